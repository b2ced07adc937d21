"""Data classes of the generators: a turn of a conversation, and a conversation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """A user message and the model's expected reply.

    ``think`` contains the scratch steps, ``expect`` the scoring criteria, and ``call`` a tool call that replaces
    ``reply``. ``before`` are messages before the user's, such as a tool result. ``given`` are spans of ``reply`` that
    a grammar writes, not the model.
    """

    kind: str
    user: str
    reply: str = ""
    think: str = ""
    call: dict[str, Any] | None = None
    expect: dict[str, Any] = field(default_factory=dict)
    before: tuple[Message, ...] = ()
    given: tuple[tuple[int, int], ...] = ()

    def messages(self) -> list[Message]:
        """Return the turn as chat messages, without scratch steps."""
        asked = [{"role": "user", "content": self.user}] if self.user else []
        return [*self.before, *asked, self.answer()]

    def answer(self) -> Message:
        """Return the model's message."""
        if self.call is None:
            return {"role": "assistant", "content": self.reply}
        return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": self.call}]}


@dataclass
class Conversation:
    """A conversation whose last message is the model's; ``trained`` marks the messages included in the loss.

    ``given`` are the spans of a message, by its number, that the loss leaves out.
    """

    kind: str
    messages: list[Message] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    thinking: bool = True
    think: str = ""
    expect: dict[str, Any] = field(default_factory=dict)
    given: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def add(self, messages: list[Message], trained: bool, given: tuple[tuple[int, int], ...] = ()) -> None:
        """Append messages; with ``trained``, the model's own ones are included in the loss, except ``given`` spans."""
        if given:
            self.given[len(self.messages) + len(messages) - 1] = given
        for message in messages:
            self.messages.append(message)
            self.trained.append(trained and message["role"] == "assistant")
