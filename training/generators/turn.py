"""What the generators make: turns of a conversation, and whole conversations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What the user says and what the model should say.

    ``think`` holds the scratch steps, ``expect`` what the scorer needs, ``call`` a tool call in place of ``reply``.
    """

    kind: str
    user: str
    reply: str = ""
    think: str = ""
    call: dict[str, Any] | None = None
    expect: dict[str, Any] = field(default_factory=dict)
    before: tuple[Message, ...] = ()

    def messages(self) -> list[Message]:
        """The turn as chat messages, without scratch steps."""
        asked = [{"role": "user", "content": self.user}] if self.user else []
        return [*self.before, *asked, self.answer()]

    def answer(self) -> Message:
        """The model's message."""
        if self.call is None:
            return {"role": "assistant", "content": self.reply}
        return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": self.call}]}


@dataclass
class Conversation:
    """A conversation whose last message is the model's; ``trained`` says which of its messages bear loss."""

    kind: str
    messages: list[Message] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    thinking: bool = True
    think: str = ""
    expect: dict[str, Any] = field(default_factory=dict)

    def add(self, messages: list[Message], trained: bool) -> None:
        """Appends messages; the model's own ones bear loss if ``trained``."""
        for message in messages:
            self.messages.append(message)
            self.trained.append(trained and message["role"] == "assistant")
