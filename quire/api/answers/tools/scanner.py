"""Reading text that is still coming: every method is a generator that yields where it needs more of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from typing import Any

Sink = Callable[[str], None]
_SPACE = " \t\r\n"


class Scanner:
    """Text that has come and was not read yet."""

    def __init__(self) -> None:
        self.held = ""
        self.ended = False
        self._read: list[str] = []

    def feed(self, text: str, *, last: bool) -> None:
        """More text."""
        self.held += text
        self.ended = self.ended or last

    def take(self, count: int) -> str:
        """So many characters, which have come."""
        taken, self.held = self.held[:count], self.held[count:]
        self._read.append(taken)
        return taken

    def note(self) -> None:
        """From here on, remember what is read."""
        self._read = []

    @property
    def noted(self) -> str:
        """What was read since the last note."""
        return "".join(self._read)

    def until(self, marks: Sequence[str], sink: Sink) -> Generator[None, None, str | None]:
        """Read up to and with the first of the marks, which is given back; the text before goes to the sink.

        Of marks at one place the longest counts. Without any, all text goes there to its end, and none is given.
        """
        while True:
            at, mark = self._first(marks)
            if mark is not None and (self.ended or not self._may_grow(at, marks)):
                sink(self.take(at))
                self.take(len(mark))
                return mark
            if mark is None:
                sink(self.take(len(self.held) - (0 if self.ended else self._partial(marks))))
            if self.ended:
                return None
            yield

    def sees(self, marks: Sequence[str]) -> Generator[None, None, bool]:
        """Whether one of the marks comes next; it stays."""
        while not self.ended and any(len(mark) > len(self.held) and mark.startswith(self.held) for mark in marks):
            yield
        return self.held.startswith(tuple(marks))

    def accept(self, text: str) -> Generator[None, None, bool]:
        """Read this text if it comes next."""
        while not self.ended and len(self.held) < len(text) and text.startswith(self.held):
            yield
        if self.held.startswith(text):
            self.take(len(text))
            return True
        return False

    def blanks(self) -> Generator[None, None, bool]:
        """Read white space; whether something follows."""
        while True:
            self.take(len(self.held) - len(self.held.lstrip(_SPACE)))
            if self.held or self.ended:
                return bool(self.held)
            yield

    def word(self, ends: str) -> Generator[None, None, str]:
        """Read up to one of some characters, which stays."""
        size = 0
        while True:
            while size < len(self.held) and self.held[size] not in ends:
                size += 1
            if size < len(self.held) or self.ended:
                return self.take(size)
            yield

    def json(self, sink: Sink) -> Generator[None, None, bool]:
        """Read one JSON value, as it is, into the sink; whether it was complete. Only its nesting is looked at."""
        if not (yield from self.blanks()):
            return False
        if self.held[0] == '"':
            return (yield from self._string(sink))
        if self.held[0] not in "{[":
            word = yield from self.word(",]}" + _SPACE)
            sink(word)
            return bool(word)
        depth = 0
        while True:
            size, done = 0, False
            while size < len(self.held):
                sign = self.held[size]
                if sign == '"':
                    break
                size += 1
                depth += (sign in "{[") - (sign in "}]")
                if depth == 0:
                    done = True
                    break
            sink(self.take(size))
            if done:
                return True
            if self.held:
                if not (yield from self._string(sink)):
                    return False
            elif self.ended:
                return False
            else:
                yield

    def value(self) -> Generator[None, None, tuple[bool, Any]]:
        """Read one JSON value; whether it was one, and what it is."""
        pieces: list[str] = []
        if not (yield from self.json(pieces.append)):
            return False, None
        try:
            return True, json.loads("".join(pieces))
        except ValueError:
            return False, None

    def _string(self, sink: Sink) -> Generator[None, None, bool]:
        size, escaped = 1, False
        while True:
            while size < len(self.held):
                sign = self.held[size]
                size += 1
                if escaped:
                    escaped = False
                elif sign == "\\":
                    escaped = True
                elif sign == '"':
                    sink(self.take(size))
                    return True
            sink(self.take(size))
            size = 0
            if self.ended:
                return False
            yield

    def _first(self, marks: Sequence[str]) -> tuple[int, str | None]:
        found = [(at, -len(mark), mark) for mark in marks if (at := self.held.find(mark)) >= 0]
        if not found:
            return -1, None
        at, _, mark = min(found)
        return at, mark

    def _may_grow(self, at: int, marks: Sequence[str]) -> bool:
        """Whether what has come may be the beginning of a longer mark, there or before."""
        tails = (self.held[begin:] for begin in range(max(0, len(self.held) - max(map(len, marks))), at + 1))
        return any(len(mark) > len(tail) and mark.startswith(tail) for tail in tails for mark in marks)

    def _partial(self, marks: Sequence[str]) -> int:
        """Length of the longest end that begins a mark."""
        longest = max(map(len, marks)) - 1
        for size in range(min(longest, len(self.held)), 0, -1):
            if any(mark.startswith(self.held[-size:]) for mark in marks):
                return size
        return 0
