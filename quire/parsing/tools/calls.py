"""Tool calls in answers: the pieces that parsers find, and the base of all parsers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.parsing.tools.scanner import Scanner
from quire.parsing.whitespace import TrailingWhitespace

Schemas = Mapping[str, Mapping[str, Any]]  # JSON schemas of the arguments, by function name
Steps = Generator[None, None, None]  # a running parser: it yields when it needs more text


@dataclass(slots=True)
class TextDelta:
    """A piece of content or of reasoning.

    Attributes:
        apart: content comes before it, but there is something between them; a line break separates them if both become
            one text.
    """

    text: str
    reasoning: bool = False
    apart: bool = False


@dataclass(slots=True)
class CallDelta:
    """A piece of a tool call: the first one has its id and name, each has more of the arguments' JSON text.

    Attributes:
        custom: the call is of a custom tool, and the arguments are its plain text input.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    custom: bool = False


Piece = TextDelta | CallDelta


@dataclass(slots=True)
class Parsed:
    """Pieces of an answer in their order. Adjacent pieces of the same kind are merged."""

    _pieces: list[Piece] = field(default_factory=list)
    _added: list[str] = field(default_factory=list)  # to the last piece; joined when it is read

    @property
    def pieces(self) -> list[Piece]:
        """All pieces."""
        if self._added:
            last = self._pieces[-1]
            added = "".join(self._added)
            self._added = []
            if isinstance(last, TextDelta):
                last.text += added
            else:
                last.arguments += added
        return self._pieces

    @property
    def reasoning(self) -> str:
        """All reasoning."""
        return "".join(piece.text for piece in self.pieces if isinstance(piece, TextDelta) and piece.reasoning)

    @property
    def content(self) -> str:
        """All content, before, between and after calls."""
        said = (piece for piece in self.pieces if isinstance(piece, TextDelta) and not piece.reasoning)
        return "".join(f"\n{piece.text}" if piece.apart else piece.text for piece in said)

    @property
    def calls(self) -> list[CallDelta]:
        """All pieces of calls."""
        return [piece for piece in self.pieces if isinstance(piece, CallDelta)]

    def add_text(self, text: str, *, reasoning: bool = False, apart: bool = False) -> None:
        """Add text. `apart`: as in `TextDelta`."""
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, TextDelta) and last.reasoning == reasoning:
            self._added.append(f"\n{text}" if apart else text)
        elif text:
            self.pieces.append(TextDelta(text, reasoning, apart))

    def add_call(self, delta: CallDelta) -> None:
        """Add a piece of a call."""
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, CallDelta) and last.index == delta.index:
            self._added.append(delta.arguments)
        else:
            self.pieces.append(delta)


def random_id(_: int, __: str) -> str:
    """An id in vLLM's format."""
    return f"chatcmpl-tool-{secrets.token_hex(16)}"


def short_id(_: int, __: str) -> str:
    """An id in the format that Mistral's templates require: nine letters and digits."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    return "".join(secrets.choice(alphabet) for _ in range(9))


class ToolParser:
    """Find tool calls in an answer that arrives in pieces.

    The result does not depend on how the text is cut. Text that is not a valid call stays content; a call whose
    arguments are cut off is reported as far as it goes.
    """

    def __init__(
        self,
        parse: Callable[[ToolParser], Steps],
        schemas: Schemas,
        make_id: Callable[[int, str], str] = random_id,
    ) -> None:
        """Make a parser; `parse` reads from the scanner and calls the methods below for each piece that it finds."""
        self.scanner = Scanner()
        self.schemas = schemas
        self._make_id = make_id
        self._parsed = Parsed()
        self._count = 0
        self.in_reasoning = False  # for formats whose answers contain the reasoning
        self._steps = parse(self)
        self._whitespace = TrailingWhitespace()  # dropped if a call comes next
        self._begins = False  # no text came after the last call
        self._said = False  # content was reported

    def push(self, text: str, *, last: bool = False) -> Parsed:
        """Add text; returns the pieces that are certain now."""
        self.scanner.feed(text, last=last)
        next(self._steps, None)
        if last and self._count == 0:
            self._parsed.add_text(self._whitespace.take())
        parsed = self._parsed
        self._parsed = Parsed()
        return parsed

    # For `parse` functions

    def add_text(self, text: str) -> None:
        """Report content. Whitespace around calls is removed."""
        begins = self._begins
        if begins:
            text = text.lstrip()
            self._begins = not text
        text = self._whitespace.push(text)
        self._parsed.add_text(text, apart=begins and self._said and bool(text))
        self._said = self._said or bool(text)

    def begin_text(self) -> None:
        """Separate the content that follows from the content before."""
        if self._said:
            self._whitespace.take()
            self._begins = True

    def add_reasoning(self, text: str) -> None:
        """Report reasoning."""
        self._parsed.add_text(text, reasoning=True)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Report the start of a call."""
        self._whitespace.take()
        self._begins = True
        name = _replace_surrogates(name)
        self._parsed.add_call(CallDelta(self._count, call_id or self._make_id(self._count, name), name))
        self._count += 1

    def add_arguments(self, text: str) -> None:
        """Report more of the arguments of the last call."""
        if text:
            self._parsed.add_call(CallDelta(self._count - 1, arguments=_replace_surrogates(text)))

    def knows(self, name: str) -> bool:
        """Return whether the request has a function with this name."""
        return name in self.schemas


def _replace_surrogates(text: str) -> str:
    """The text with lone surrogates replaced, which a model may have written as escapes."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def join_calls(deltas: Iterable[CallDelta]) -> list[CallDelta]:
    """Complete calls, merged from their pieces."""
    calls: list[CallDelta] = []
    for delta in deltas:
        if delta.index == len(calls):
            calls.append(CallDelta(delta.index, delta.id, delta.name, custom=delta.custom))
        calls[delta.index].arguments += delta.arguments
    return calls
