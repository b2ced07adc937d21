"""Reads the texts that custom tools are called with out of the arguments' JSON, while that is still coming."""

from __future__ import annotations

import re
from collections.abc import Collection

from quire.api.answers.tools.calls import CallDelta, Parsed, Steps
from quire.api.answers.tools.custom import INPUT
from quire.api.answers.tools.scanner import Scanner

# What of a JSON string can be read: characters, whole escapes, and what begins like an escape but cannot be one.
_READABLE = re.compile(r'(?:[^"\\]|\\u[\da-fA-F]{4}|\\u(?=[\da-fA-F]{0,3}[^\da-fA-F])|\\[^u])*+', re.DOTALL)
_ESCAPE = re.compile(r"\\u([\da-fA-F]{4})|\\(.)", re.DOTALL)
_BEGIN = f'{{"{INPUT}":'
_EMPTY = ("{}", *(_BEGIN[:size] for size in range(len(_BEGIN) + 1)))  # arguments without any input, or before it
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/"}


class InputReader:
    """Takes the arguments of one call in pieces and gives the text of its `input`.

    However they are cut, what comes out adds up to the same. Arguments without an `input` are the text themselves;
    an escape that breaks off is left out, and half a character is replaced.
    """

    def __init__(self) -> None:
        self._scanner = Scanner()
        self._given: list[str] = []
        self._found: list[str] = []
        self._half = ""  # a character's first half, whose second may come
        self._inside = False  # the input has begun
        self._steps = self._read()

    def push(self, arguments: str, *, last: bool = False) -> str:
        """Text that is certain after more of the arguments."""
        if not self._inside:
            self._given.append(arguments)
        self._scanner.feed(arguments, last=last)
        next(self._steps, None)
        if last and not self._inside:
            whole = "".join(self._given)
            return "" if "".join(whole.split()) in _EMPTY else whole
        return self._whole_characters(last)

    def _read(self) -> Steps:
        scan = self._scanner
        yield from scan.blanks()
        if not (yield from scan.accept("{")):
            return
        while (yield from scan.blanks()):
            complete, key = yield from scan.value()
            yield from scan.blanks()
            if not complete or not (yield from scan.accept(":")):
                return
            if key == INPUT and (yield from scan.blanks()):
                self._inside = True
                yield from self._text() if scan.held[0] == '"' else scan.json(self._found.append)
                return
            yield from scan.value()
            yield from scan.blanks()
            yield from scan.accept(",")

    def _text(self) -> Steps:
        scan = self._scanner
        scan.take(1)
        while True:
            found = _READABLE.match(scan.held)
            if found is not None and found[0]:
                self._found.append(_ESCAPE.sub(_plain, scan.take(found.end())))
            if scan.held[:1] == '"' or scan.ended:
                return
            yield

    def _whole_characters(self, last: bool) -> str:
        text = self._half + "".join(self._found)
        self._found.clear()
        self._half = text[-1:] if not last and "\ud800" <= text[-1:] <= "\udbff" else ""
        text = text.removesuffix(self._half)
        return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class CustomCalls:
    """Turns the arguments of custom tools' calls into the texts that they hold."""

    def __init__(self, names: Collection[str]) -> None:
        """`names` of the custom tools."""
        self._names = names
        self._reader: InputReader | None = None  # of the last call, until something follows it
        self._index = 0

    def read(self, found: Parsed, *, last: bool) -> Parsed:
        """The same pieces with texts in place of arguments."""
        read = Parsed()
        for piece in found.pieces:
            if not isinstance(piece, CallDelta):
                self._end(read)
                read.say(piece.text, reasoning=piece.reasoning)
                continue
            if piece.name is not None:
                self._end(read)
                self._reader = InputReader() if piece.name in self._names else None
                self._index = piece.index
            if self._reader is None:
                read.call(piece)
            else:
                text = self._reader.push(piece.arguments)
                self._tell(read, CallDelta(piece.index, piece.id, piece.name, text, custom=True))
        if last:
            self._end(read)
        return read

    def _end(self, read: Parsed) -> None:
        if self._reader is not None:
            self._tell(read, CallDelta(self._index, arguments=self._reader.push("", last=True), custom=True))
        self._reader = None

    def _tell(self, read: Parsed, delta: CallDelta) -> None:
        if delta.name is not None or delta.arguments:
            read.call(delta)


def _plain(escape: re.Match[str]) -> str:
    """What an escape stands for; itself, if for nothing."""
    if escape[1] is not None:
        return chr(int(escape[1], 16))
    return _ESCAPED.get(escape[2], escape[0])
