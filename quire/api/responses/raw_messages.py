"""What the model has read and written, as text and tokens, for `enable_response_messages`."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.client.stream import Delta
from quire.protocol.responses import RawMessage
from quire.rendering.prompts import Prompt


@dataclass(slots=True)
class RawMessages:
    """The prompts and answers of all turns."""

    prompts: list[RawMessage] = field(default_factory=list)
    answers: list[RawMessage] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)  # of the last answer

    def start_turn(self, prompt: Prompt) -> None:
        """Append a prompt, and an answer without tokens."""
        self._end_turn()
        self.prompts.append(RawMessage(message=prompt.text or "", tokens=prompt.token_ids.tolist()))
        self.answers.append(RawMessage(message="", tokens=[]))

    def add(self, delta: Delta) -> None:
        """Append a piece of the last answer."""
        self._texts.append(delta.text)
        self.answers[-1].tokens += delta.token_ids

    def complete(self) -> tuple[list[RawMessage], list[RawMessage]]:
        """All prompts and answers."""
        self._end_turn()
        return self.prompts, self.answers

    def _end_turn(self) -> None:
        if self._texts:
            self.answers[-1].message += "".join(self._texts)
            self._texts.clear()
