"""Scans text that is still coming: every method is a generator that yields where it needs more of it.

No character is searched more than a constant number of times, however the text is cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import lru_cache
from typing import Any

from quire.engine.client.partial import partial_suffix

Sink = Callable[[str], None]
_WHITESPACE = " \t\r\n"
_SPACES = re.compile(f"[{_WHITESPACE}]*")
_FEW_SPACES = re.compile(f"[{_WHITESPACE}]{{0,64}}")


class Scanner:
    """Read the text that has arrived.

    Attributes:
        ended: no more text will arrive.
    """

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0  # number of characters of `_text` that were read
        self._read: list[str] = []
        self._stops: tuple[str, ...] = ()
        self._stop_signs = ""  # their first characters

    def stop_json_at(self, marks: Iterable[str]) -> None:
        """Let the marks end values of JSON, also incomplete ones. In a string, only a mark before another mark does."""
        # Marks of letters and digits may be in any JSON.
        stops = {mark for mark in marks if mark and not mark[0].isalnum()}
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._stop_signs = "".join({mark[0] for mark in self._stops})

    def unread(self, text: str) -> None:
        """Take back the text that was read last."""
        self._at -= len(text)
        self._read.pop()

    def feed(self, text: str, *, last: bool) -> None:
        """Append text; `last`: no more will come."""
        self._text = self._text[self._at :] + text
        self._at = 0
        self.ended = self.ended or last

    @property
    def next_character(self) -> str:
        """The first character that was not read; empty if more text must arrive first."""
        return self._text[self._at : self._at + 1]

    def take(self, count: int) -> str:
        """Read a number of characters, which must have arrived."""
        taken = self._text[self._at : self._at + count]
        self._at += count
        if taken:
            self._read.append(taken)
        return taken

    def take_match(self, pattern: re.Pattern[str]) -> str:
        """Read the next match of the pattern."""
        match = pattern.match(self._text, self._at)
        return "" if match is None else self.take(match.end() - self._at)

    def mark(self) -> None:
        """Begin to record the text that is read."""
        self._read = []

    @property
    def since_mark(self) -> str:
        """The text read since the last `mark`."""
        return "".join(self._read)

    def read_rest(self, sink: Sink) -> Generator[None, None, None]:
        """Read all text up to its end into the sink."""
        while True:
            sink(self.take(self._left))
            if self.ended:
                return
            yield

    def read_until(self, marks: Sequence[str], sink: Sink) -> Generator[None, None, str | None]:
        """Read up to and including the first of the marks, which is returned; the text before it goes to the sink.

        If several marks match at one position, the longest is used. If there is none until the end of the text, all of
        the text goes to the sink and None is returned.
        """
        longest = max(map(len, marks))
        while True:
            match = _first_of(tuple(marks)).search(self._text, self._at)
            if match is not None and (self.ended or not self._may_grow(match.start(), marks, longest)):
                sink(self.take(match.start() - self._at))
                return self.take(len(match[0]))
            if match is None:
                tail = "" if self.ended else self._text[max(self._at, len(self._text) - longest) :]
                sink(self.take(self._left - partial_suffix(tail, marks, longest)))
            if self.ended:
                return None
            yield

    def next_is(self, marks: Sequence[str]) -> Generator[None, None, bool]:
        """Return whether one of the marks comes next; it is not read."""
        while not self.ended and any(self._is_cut_off(mark) for mark in marks):
            yield
        return self._text.startswith(tuple(marks), self._at)

    def accept(self, text: str) -> Generator[None, None, bool]:
        """Read this text if it comes next; returns whether it did."""
        while not self.ended and self._is_cut_off(text):
            yield
        if self._text.startswith(text, self._at):
            self.take(len(text))
            return True
        return False

    def skip_whitespace(self) -> Generator[None, None, bool]:
        """Read whitespace; returns whether anything follows."""
        while True:
            self.take_match(_SPACES)
            if self._left or self.ended:
                return bool(self._left)
            yield

    def read_word(self, ends: str) -> Generator[None, None, str]:
        """Read up to one of the characters in `ends`, which is not read."""
        pieces: list[str] = []
        while True:
            pieces.append(self.take_match(_run_without(ends)))
            if self._left or self.ended:
                return "".join(pieces)
            yield

    def read_json(self, sink: Sink, *, depth: int = 0) -> Generator[None, None, bool]:
        """Read a JSON value into the sink, unchanged; returns whether it was complete. Only its nesting is checked.

        `depth`: number of open objects and lists; 0 at the start of the value.
        """
        if not depth:
            if not (yield from self.skip_whitespace()):
                return False
            if self.next_character == '"':
                return (yield from self.read_string(sink))
            if self.next_character not in "{[":
                word = yield from self.read_word(",]}" + _WHITESPACE + self._stop_signs)
                sink(word)
                return bool(word)
        matters = _any_of('"{}[]' + self._stop_signs)
        while True:
            match = matters.search(self._text, self._at)
            if match is None:
                sink(self.take(self._left))
                if self.ended:
                    return False
                yield
                continue
            sink(self.take(match.start() - self._at))
            if match[0] in self._stop_signs and (yield from self._stops_here(in_string=False)):
                return False
            if match[0] == '"':
                if not (yield from self.read_string(sink)):
                    return False
                continue
            sink(self.take(1))
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(match[0], 0)
            if depth == 0:
                return True

    def read_value(self) -> Generator[None, None, tuple[bool, Any]]:
        """Read and parse a JSON value; returns whether it was valid, and its value."""
        pieces: list[str] = []
        if not (yield from self.read_json(pieces.append)):
            return False, None
        try:
            return True, json.loads("".join(pieces))
        except (ValueError, RecursionError):
            return False, None

    @property
    def _left(self) -> int:
        """Number of characters that have arrived and were not read."""
        return len(self._text) - self._at

    def read_string(self, sink: Sink) -> Generator[None, None, bool]:
        """Read a string into the sink, unchanged, with the quotes around it; returns whether it was complete."""
        quote = self.take(1)
        sink(quote)
        inside = _in_string(quote + self._stop_signs)
        while True:
            sink(self.take_match(inside))
            character = self.next_character
            if character == quote:
                sink(self.take(1))
                return True
            if character and character in self._stop_signs:
                if (yield from self._stops_here(in_string=True)):
                    return False
                sink(self.take(1))
                continue
            if self.ended:
                sink(self.take(self._left))
                return False
            yield

    def _stops_here(self, *, in_string: bool) -> Generator[None, None, bool]:
        """Return whether a mark that ends JSON comes next; it is not read. A string may contain the text of a mark."""
        while True:
            mark = next((mark for mark in self._stops if self._text.startswith(mark, self._at)), None)
            if mark is not None and not in_string:
                return True
            if self.ended or not any(self._is_cut_off(mark) for mark in self._stops):
                if mark is None:
                    return False
                spaces = _FEW_SPACES.match(self._text, self._at + len(mark))
                ahead = self._text[spaces.end() if spaces is not None else self._at :][: max(map(len, self._stops))]
                if ahead.startswith(self._stops) or (self.ended and not ahead):
                    return True
                if self.ended or not any(sign.startswith(ahead) for sign in self._stops):
                    return False
            yield

    def _is_cut_off(self, mark: str) -> bool:
        """Return whether all that has arrived is the beginning of this mark."""
        return self._left < len(mark) and mark.startswith(self._text[self._at :])

    def _may_grow(self, at: int, marks: Sequence[str], longest: int) -> bool:
        """Return whether the text may end with the beginning of a longer mark that starts at `at` or before."""
        begins = range(max(self._at, len(self._text) - longest), at + 1)
        tails = (self._text[begin:] for begin in begins)
        return any(len(mark) > len(tail) and mark.startswith(tail) for tail in tails for mark in marks)


@lru_cache(maxsize=256)
def _first_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern of any of the marks; the longest where several match."""
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))


@lru_cache(maxsize=256)
def _run_without(characters: str) -> re.Pattern[str]:
    """A pattern of a run of other characters."""
    return re.compile(f"[^{re.escape(characters)}]*")


@lru_cache(maxsize=256)
def _any_of(characters: str) -> re.Pattern[str]:
    """A pattern of any of the characters."""
    return re.compile(f"[{re.escape(characters)}]")


@lru_cache(maxsize=256)
def _in_string(ends: str) -> re.Pattern[str]:
    """A pattern of the rest of a string, up to one of the characters or to an escape that is cut off."""
    return re.compile(rf"(?:[^{re.escape(ends)}\\]++|\\.)*+", re.DOTALL)
