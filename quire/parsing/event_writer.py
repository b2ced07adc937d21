"""Streams of parts: a part of an answer is opened, extended and closed before the next one is opened."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, Literal, TypeVar

from quire.parsing.tools.calls import CallDelta, Parsed

Event = TypeVar("Event")
TextKind = Literal["text", "reasoning"]


class EventWriter(ABC, Generic[Event]):
    """Turn the pieces of an answer into the events of its parts. Subclasses make the events of one API."""

    def __init__(self, *, reasoning: bool) -> None:
        """`reasoning`: whether reasoning is shown."""
        self._reasoning = reasoning
        self._open: TextKind | Literal["call"] | None = None  # kind of the part that is open

    def write(self, parsed: Parsed) -> Iterator[Event]:
        """Events of further pieces."""
        for piece in parsed.pieces:
            if isinstance(piece, CallDelta):
                yield from self._write_call(piece)
            elif not piece.reasoning:
                follows = piece.apart and self._open == "text"  # the whitespace between them was dropped
                yield from self._write_text("text", f"\n{piece.text}" if follows else piece.text)
            elif self._reasoning:
                yield from self._write_text("reasoning", piece.text)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Events of the end of the open part, if there is one."""
        if self._open is not None:
            yield from self._closed(self._open, status)
            self._open = None

    def _write_call(self, call: CallDelta) -> Iterator[Event]:
        if call.name is not None:
            yield from self.close()
            self._open = "call"
            yield from self._call_opened(call)
        if call.arguments:
            yield self._call_extended(call.arguments)

    def _write_text(self, kind: TextKind, text: str) -> Iterator[Event]:
        if self._open != kind:
            yield from self.close()
            self._open = kind
            yield from self._text_opened(kind)
        yield self._text_extended(kind, text)

    @abstractmethod
    def _text_opened(self, kind: TextKind) -> Iterator[Event]:
        """Events of a new part with text."""

    @abstractmethod
    def _text_extended(self, kind: TextKind, text: str) -> Event:
        """The event of more text of the open part."""

    @abstractmethod
    def _call_opened(self, call: CallDelta) -> Iterator[Event]:
        """Events of a new part with a tool call."""

    @abstractmethod
    def _call_extended(self, arguments: str) -> Event:
        """The event of more arguments of the open call."""

    @abstractmethod
    def _closed(self, kind: TextKind | Literal["call"], status: str) -> Iterator[Event]:
        """Events of the end of the open part."""
