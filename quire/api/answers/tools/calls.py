"""What comes of a text with calls in it, and what every parser of such a text is."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.api.answers.tools.scanner import Scanner

Schemas = Mapping[str, Mapping[str, Any]]  # of each function's arguments, by its name
Steps = Generator[None, None, None]  # a parser at work: it yields where it needs more text


@dataclass(slots=True)
class TextDelta:
    """A piece of text: of the answer itself, or of reasoning."""

    text: str
    reasoning: bool = False


@dataclass(slots=True)
class CallDelta:
    """A piece of a call: the first one has id and name, all have more of the arguments' JSON.

    Attributes:
        custom: it is of a custom tool, and the arguments are the text that the tool is called with.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    custom: bool = False


Piece = TextDelta | CallDelta


@dataclass(slots=True)
class Parsed:
    """Text and calls that are certain, in the order of the answer. Pieces of one kind that touch are one piece."""

    pieces: list[Piece] = field(default_factory=list)

    @property
    def reasoning(self) -> str:
        """All of it."""
        return "".join(piece.text for piece in self.pieces if isinstance(piece, TextDelta) and piece.reasoning)

    @property
    def content(self) -> str:
        """The text of the answer itself, wherever calls stand in it."""
        return "".join(piece.text for piece in self.pieces if isinstance(piece, TextDelta) and not piece.reasoning)

    @property
    def calls(self) -> list[CallDelta]:
        """All pieces of calls."""
        return [piece for piece in self.pieces if isinstance(piece, CallDelta)]

    def say(self, text: str, *, reasoning: bool = False) -> None:
        """Add text."""
        last = self.pieces[-1] if self.pieces else None
        if isinstance(last, TextDelta) and last.reasoning == reasoning:
            last.text += text
        elif text:
            self.pieces.append(TextDelta(text, reasoning))

    def call(self, delta: CallDelta) -> None:
        """Add a piece of a call."""
        last = self.pieces[-1] if self.pieces else None
        if isinstance(last, CallDelta) and last.index == delta.index:
            last.arguments += delta.arguments
        else:
            self.pieces.append(delta)


def random_id(_: int, __: str) -> str:
    """An id as vLLM and OpenAI give them."""
    return f"chatcmpl-tool-{secrets.token_hex(16)}"


def short_id(_: int, __: str) -> str:
    """An id as Mistral's templates want it: nine letters and digits."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    return "".join(secrets.choice(alphabet) for _ in range(9))


class ToolParser:
    """Takes an answer's text in pieces and tells its calls from the rest.

    However the text is cut, the pieces add up to the same, in the same order. What turns out to be no call stays
    content; a call whose arguments break off stays as far as it went.
    """

    def __init__(
        self,
        parse: Callable[[ToolParser], Steps],
        schemas: Schemas,
        make_id: Callable[[int, str], str] = random_id,
    ) -> None:
        """`parse` reads the scanner and reports what it finds with the methods below."""
        self.scanner = Scanner()
        self.schemas = schemas
        self._make_id = make_id
        self._found = Parsed()
        self._count = 0
        self.thinking = False  # within reasoning, for forms that hold it
        self._steps = parse(self)
        self._blank = ""  # white space that is dropped if a call comes next
        self._after_call = False

    def push(self, text: str, *, last: bool = False) -> Parsed:
        """What is certain after more text."""
        self.scanner.feed(text, last=last)
        next(self._steps, None)
        if last and self._count == 0:
            self._found.say(self._blank)
        found, self._found = self._found, Parsed()
        return found

    # What parsers report

    def say(self, text: str) -> None:
        """Text that is no call. White space around calls is none of it."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        body = text.rstrip()
        if body:
            self._found.say(self._blank + body)
            self._blank = ""
        self._blank += text[len(body) :]

    def think(self, text: str) -> None:
        """Text that is reasoning."""
        self._found.say(text, reasoning=True)

    def begin(self, name: str, call_id: str | None = None) -> None:
        """A call of a function."""
        self._blank, self._after_call = "", True
        name = _whole_characters(name)
        self._found.call(CallDelta(self._count, call_id or self._make_id(self._count, name), name))
        self._count += 1

    def argue(self, text: str) -> None:
        """More of the arguments of the call that was begun."""
        if text:
            self._found.call(CallDelta(self._count - 1, arguments=_whole_characters(text)))

    def knows(self, name: str) -> bool:
        """Whether there is such a function."""
        return name in self.schemas


def _whole_characters(text: str) -> str:
    """Without halves of characters, which a model may have spelt out."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def joined(deltas: Iterable[CallDelta]) -> list[CallDelta]:
    """The whole calls that deltas make up."""
    whole: list[CallDelta] = []
    for delta in deltas:
        if delta.index == len(whole):
            whole.append(CallDelta(delta.index, delta.id, delta.name, custom=delta.custom))
        whole[delta.index].arguments += delta.arguments
    return whole
