"""Calls in Python syntax, [weather(city="Rome"), now()] (Llama 4 and others), and in FunctionGemma's syntax."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from quire.parsing.tools.calls import Steps, ToolParser
from quire.parsing.tools.values import as_json, properties_of, python_value, types_of

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_AFTER_NAME = "( \t\r\n]\"'{}[,=<"
_PLAIN = re.compile(r"""[^"'()\[\]{}]*""")  # neither brackets nor quotes
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_CALL_PREFIX = re.compile(r"\A\s*(?:(?:call)?:)?\s*")
_DOUBLE_QUOTED = r'"(?:[^"\\]++|\\.)*+"?'  # to the end, if it is not closed: other places are not tried then
_SINGLE_QUOTED = r"'(?:[^'\\]++|\\.)*+'?"
_KEY = r"(?P<before>[{,]|^)\s*(?P<key>[A-Za-z_][\w.-]*)\s*:"
_BARE = r'(?<=[:\[,])\s*(?P<bare>[^\s"\[\]{},:][^"\[\]{},]*)'  # a number, a constant, or a text without quotes
_BRACE_PARTS = re.compile(f"{_DOUBLE_QUOTED}|{_KEY}|{_BARE}", re.DOTALL)
_STRING_OR_ZEROS = re.compile(rf"(?P<string>{_DOUBLE_QUOTED}|{_SINGLE_QUOTED})|(?<![\w.])0+(?=\d)", re.DOTALL)
_ESCAPE_OR_CONTROL = re.compile(r"\\.|[\n\r\0]", re.DOTALL)
_ESCAPES = {"\n": r"\n", "\r": r"\r", "\0": r"\x00"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonSyntax:
    """Calls in brackets as the whole answer, or between marks.

    Attributes:
        begins, ends: the marks before and after calls.
        listed: calls are in brackets, also without marks; otherwise they are on lines between the marks.
    """

    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    listed: bool = True

    def parse(self, out: ToolParser) -> Steps:
        """Parse an answer."""
        scan = out.scanner
        if self.listed:
            scan.mark()
            yield from scan.skip_whitespace()
            if (yield from scan.accept("[")):
                yield from self._list(out)
            else:
                out.add_text(scan.since_mark)
        while self.begins and (mark := (yield from scan.read_until(self.begins, out.add_text))) is not None:
            scan.mark()
            yield from scan.skip_whitespace()
            if not self.listed:
                yield from self._lines(out)
            elif (yield from scan.accept("[")):
                yield from self._list(out, mark)
            else:
                out.add_text(mark + scan.since_mark)
        yield from scan.read_rest(out.add_text)

    def _list(self, out: ToolParser, mark: str = "") -> Steps:
        """Parse calls to the end of the list."""
        scan = out.scanner
        any_call = False
        while (called := (yield from _call(out))) is not None:
            any_call = any_call or called
            if not called:
                out.add_text(mark + scan.since_mark)
            mark = ""
            scan.mark()
            yield from scan.skip_whitespace()
            if not (yield from scan.accept(",")):
                yield from scan.accept("]")
                yield from self._end(out)
                if not any_call:
                    out.add_text(scan.since_mark)
                return
        out.add_text(mark + scan.since_mark)

    def _lines(self, out: ToolParser) -> Steps:
        """Parse calls to the mark after them. What is not a call is text to the end of its line."""
        scan = out.scanner
        while not (yield from self._end(out)) and (yield from scan.skip_whitespace()):
            scan.mark()
            if not (yield from _call(out)):
                out.add_text(scan.since_mark)
                mark = yield from scan.read_until(("\n", *self.ends), out.add_text)
                if mark != "\n":
                    return

    def _end(self, out: ToolParser) -> Generator[None, None, bool]:
        """Read the mark after calls if it comes next; returns whether it did."""
        yield from out.scanner.skip_whitespace()
        for mark in self.ends:
            if (yield from out.scanner.accept(mark)):
                return True
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class BraceSyntax:
    """FunctionGemma and Gemma 4: call:NAME{key:value,...} between two marks; strings are between two quote marks."""

    begin: str
    end: str
    quote: str

    def parse(self, out: ToolParser) -> Steps:
        """Parse an answer."""
        scan = out.scanner
        mark = yield from scan.read_until((self.begin,), out.add_text)
        while mark is not None:
            pieces: list[str] = []
            mark = yield from scan.read_until((self.end, self.begin), pieces.append)
            name, brace, body = _CALL_PREFIX.sub("", "".join(pieces)).partition("{")
            inside, closed, _ = body.rpartition("}")
            arguments = self._arguments(inside if closed else body, out.schemas.get(name.strip(), {}))
            if not name or not brace or arguments is None or mark is None:
                out.add_text(self.begin + "".join(pieces) + (self.end if mark == self.end else ""))
            else:
                out.begin_call(name.strip())
                out.add_arguments(arguments)
            if mark == self.end:
                mark = yield from scan.read_until((self.begin,), out.add_text)

    def _arguments(self, body: str, schema: Mapping[str, Any]) -> str | None:
        pieces = body.split(self.quote)
        for index in range(0, len(pieces), 2):
            pieces[index] = _BRACE_PARTS.sub(_as_json_part, pieces[index])
            if index and pieces[index][:1] == '"':  # the comma after the string is missing
                pieces[index] = "," + pieces[index]
        for index in range(1, len(pieces), 2):
            pieces[index] = json.dumps(pieces[index], ensure_ascii=False)
        try:
            values = json.loads("{" + "".join(pieces) + "}")
        except (ValueError, RecursionError):
            return None
        properties = properties_of(schema)
        for key, value in values.items():
            types = types_of(properties.get(key), schema)
            if isinstance(value, str) and types is not None and "string" not in types:
                values[key] = json.loads(as_json(value, types))
        return json.dumps(values, ensure_ascii=False)


def _as_json_part(match: re.Match[str]) -> str:
    """A part of arguments in braces as JSON: keys have no quotes there, and models leave them out around texts, too."""
    if (key := match["key"]) is not None:
        return f'{match["before"]}"{key}":'
    return match[0] if match["bare"] is None else as_json(match["bare"].strip(), None)


def _call(out: ToolParser) -> Generator[None, None, bool | None]:
    """Parse a call; returns whether the call can be read, or None if the text is not a call."""
    scan = out.scanner
    yield from scan.skip_whitespace()
    name = yield from scan.read_word(_AFTER_NAME)
    if not _NAME.fullmatch(name) or not (yield from scan.accept("(")):
        return None
    pieces: list[str] = []
    if not (yield from _balanced(out, pieces)):
        return None
    arguments = _literal("".join(pieces))
    if arguments is None:
        return False
    out.begin_call(name)
    out.add_arguments(arguments)
    return True


def _balanced(out: ToolParser, pieces: list[str]) -> Generator[None, None, bool]:
    """Read up to the bracket that closes the call; returns whether it was found, and no other in its place."""
    scan = out.scanner
    closing = [")"]
    while True:
        pieces.append(scan.take_match(_PLAIN))
        sign = scan.next_character
        if sign in ('"', "'"):
            if not (yield from scan.read_string(pieces.append)):
                return False
        elif sign in _CLOSING:
            closing.append(_CLOSING[sign])
            pieces.append(scan.take(1))
        elif sign:
            if sign != closing.pop():
                return False
            scan.take(1)
            if not closing:
                return True
            pieces.append(sign)
        elif scan.ended:
            return False
        else:
            yield


def _literal(arguments: str) -> str | None:
    """Keyword arguments as JSON text; None if they are not literals."""
    text = _keyword_arguments(arguments)
    return _keyword_arguments(_repaired(arguments)) if text is None else text


def _repaired(arguments: str) -> str:
    """Arguments in which line breaks in strings are escaped, and numbers do not begin with zeros.

    Python accepts neither; models write them.
    """

    def repaired(match: re.Match[str]) -> str:
        string = match["string"] or ""
        return _ESCAPE_OR_CONTROL.sub(lambda part: _ESCAPES.get(part[0], part[0]), string)

    return _STRING_OR_ZEROS.sub(repaired, arguments)


def _keyword_arguments(arguments: str) -> str | None:
    try:
        call = ast.parse(f"f({arguments})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {keyword.arg: python_value(keyword.value) for keyword in call.keywords if keyword.arg is not None}
        return json.dumps(values, ensure_ascii=False, allow_nan=False) if len(values) == len(call.keywords) else None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
