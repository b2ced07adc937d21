"""Extracts the plain text input of custom tool calls from the arguments' JSON while it streams."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from quire.parsing.tools.calls import CallDelta, Parsed, Steps
from quire.parsing.tools.custom import INPUT
from quire.parsing.tools.scanner import Scanner

# The part of a JSON string that can be decoded: characters, complete escapes, and invalid escapes.
_READABLE = re.compile(r'(?:[^"\\]|\\u[\da-fA-F]{4}|\\u(?=[\da-fA-F]{0,3}[^\da-fA-F])|\\[^u])*+', re.DOTALL)
_ESCAPE = re.compile(r"\\u([\da-fA-F]{4})|\\(.)", re.DOTALL)
_BEGIN = f'{{"{INPUT}":'
_EMPTY = ("{}", *(_BEGIN[:size] for size in range(len(_BEGIN) + 1)))  # arguments without an input
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/"}


class CustomInputReader:
    """Extract `input` from the arguments of one call, which arrive in pieces.

    The result does not depend on how the arguments are cut. Arguments without an `input` are returned unchanged, or
    as text if they are a string; an escape that is cut off is dropped, and lone surrogates are replaced.
    """

    def __init__(self) -> None:
        self._scanner = Scanner()
        self._arguments: list[str] = []
        self._texts: list[str] = []
        self._high_surrogate = ""  # whose second half may still arrive
        self._inside = False  # in the value of `input`
        self._steps = self._read()

    def push(self, arguments: str, *, last: bool = False) -> str:
        """Add a piece of the arguments; returns the text that is certain now."""
        if not self._inside:
            self._arguments.append(arguments)
        self._scanner.feed(arguments, last=last)
        next(self._steps, None)
        if last and not self._inside:
            arguments = "".join(self._arguments)
            return "" if "".join(arguments.split()) in _EMPTY else _string(arguments)
        return self._join_surrogates(last)

    def _read(self) -> Steps:
        yield from self._find_input()
        yield from self._scanner.read_rest(lambda _: None)

    def _find_input(self) -> Steps:
        scan = self._scanner
        yield from scan.skip_whitespace()
        if not (yield from scan.accept("{")):
            return
        while (yield from scan.skip_whitespace()):
            complete, key = yield from scan.read_value()
            yield from scan.skip_whitespace()
            if not complete or not (yield from scan.accept(":")):
                return
            if key == INPUT and (yield from scan.skip_whitespace()):
                self._inside = True
                yield from self._text() if scan.next_character == '"' else scan.read_json(self._texts.append)
                return
            yield from scan.read_value()
            yield from scan.skip_whitespace()
            yield from scan.accept(",")

    def _text(self) -> Steps:
        scan = self._scanner
        scan.take(1)
        while True:
            self._texts.append(_ESCAPE.sub(_unescaped, scan.take_match(_READABLE)))
            if scan.next_character == '"' or scan.ended:
                return
            yield

    def _join_surrogates(self, last: bool) -> str:
        text = self._high_surrogate + "".join(self._texts)
        self._texts.clear()
        self._high_surrogate = text[-1:] if not last and "\ud800" <= text[-1:] <= "\udbff" else ""
        text = text.removesuffix(self._high_surrogate)
        return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class CustomCallReader:
    """Replace the arguments of custom tool calls by their plain text input."""

    def __init__(self, names: Collection[str]) -> None:
        """`names`: names of the custom tools."""
        self._names = names
        self._reader: CustomInputReader | None = None  # of the last call, until it ends
        self._index = 0

    def read(self, parsed: Parsed, *, last: bool) -> Parsed:
        """The same pieces, with plain text in place of arguments in custom tool calls."""
        read = Parsed()
        for piece in parsed.pieces:
            if not isinstance(piece, CallDelta):
                self._end(read)
                read.add_text(piece.text, reasoning=piece.reasoning, apart=piece.apart)
                continue
            if piece.name is not None:
                self._end(read)
                self._reader = CustomInputReader() if piece.name in self._names else None
                self._index = piece.index
            if self._reader is None:
                read.add_call(piece)
            else:
                text = self._reader.push(piece.arguments)
                self._emit(read, CallDelta(piece.index, piece.id, piece.name, text, custom=True))
        if last:
            self._end(read)
        return read

    def _end(self, read: Parsed) -> None:
        if self._reader is not None:
            self._emit(read, CallDelta(self._index, arguments=self._reader.push("", last=True), custom=True))
        self._reader = None

    def _emit(self, read: Parsed, delta: CallDelta) -> None:
        if delta.name is not None or delta.arguments:
            read.add_call(delta)


def _string(arguments: str) -> str:
    """The text of a JSON string; anything else unchanged."""
    try:
        text = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return text if isinstance(text, str) else arguments


def _unescaped(escape: re.Match[str]) -> str:
    """The character of an escape; the escape itself if it is not valid."""
    if escape[1] is not None:
        return chr(int(escape[1], 16))
    return _ESCAPED.get(escape[2], escape[0])
