"""Calls in Python syntax, [weather(city="Rome"), now()] (Llama 4 and others), and in FunctionGemma's syntax."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator
from dataclasses import dataclass

from quire.api.answers.tools.calls import Steps, ToolParser
from quire.api.answers.tools.values import python_value

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_PLAIN = re.compile(r"""[^"'()\[\]{}]*""")  # neither brackets nor quotes


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonSyntax:
    """A list of calls as the whole answer, or between marks."""

    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()

    def parse(self, out: ToolParser) -> Steps:
        """Parse an answer."""
        scan = out.scanner
        scan.mark()
        for mark in self.begins:
            yield from scan.skip_whitespace()
            yield from scan.accept(mark)
        yield from scan.skip_whitespace()
        if (yield from scan.accept("[")) and (yield from self._list(out)):
            for mark in self.ends:
                yield from scan.skip_whitespace()
                yield from scan.accept(mark)
        else:
            out.add_text(scan.since_mark)
        yield from scan.read_rest(out.add_text)

    def _list(self, out: ToolParser) -> Generator[None, None, bool]:
        """Parse calls to the end of the list; returns whether there was any."""
        scan, any_call = out.scanner, False
        while True:
            yield from scan.skip_whitespace()
            name = yield from scan.read_word("( \t\r\n]\"'{}[,=")
            if not _NAME.fullmatch(name) or not (yield from scan.accept("(")):
                return any_call
            pieces: list[str] = []
            if not (yield from _balanced(out, pieces)):
                return any_call
            arguments = _literal("".join(pieces))
            if arguments is None:
                return any_call
            out.begin_call(name)
            out.add_arguments(arguments)
            any_call = True
            scan.mark()
            yield from scan.skip_whitespace()
            if not (yield from scan.accept(",")):
                yield from scan.accept("]")
                return True


@dataclass(frozen=True, slots=True, kw_only=True)
class BraceSyntax:
    """FunctionGemma: call:NAME{key:value,...} between two marks; strings are between two quote marks."""

    begin: str
    end: str
    quote: str

    def parse(self, out: ToolParser) -> Steps:
        """Parse an answer."""
        scan = out.scanner
        while (yield from scan.read_until((self.begin,), out.add_text)) is not None:
            pieces: list[str] = []
            found = yield from scan.read_until((self.end,), pieces.append)
            name, brace, body = "".join(pieces).strip().removeprefix("call:").partition("{")
            arguments = self._arguments(body.rpartition("}")[0]) if found and brace else None
            if arguments is None:
                out.add_text(self.begin + "".join(pieces) + (found or ""))
            else:
                out.begin_call(name.strip())
                out.add_arguments(arguments)

    def _arguments(self, body: str) -> str | None:
        pieces = body.split(self.quote)
        for index in range(0, len(pieces), 2):
            pieces[index] = re.sub(r"([{,]|^)\s*([A-Za-z_][\w.-]*)\s*:", r'\1"\2":', pieces[index])
        for index in range(1, len(pieces), 2):
            pieces[index] = json.dumps(pieces[index], ensure_ascii=False)
        try:
            return json.dumps(json.loads("{" + "".join(pieces) + "}"), ensure_ascii=False)
        except (ValueError, RecursionError):
            return None


def _balanced(out: ToolParser, pieces: list[str]) -> Generator[None, None, bool]:
    """Read up to the bracket that closes the call; returns whether it was found."""
    scan, depth = out.scanner, 1
    while True:
        pieces.append(scan.take_match(_PLAIN))
        sign = scan.next_character
        if sign in ('"', "'"):
            if not (yield from scan.read_string(pieces.append)):
                return False
        elif sign:
            scan.take(1)
            depth += 1 if sign in "([{" else -1
            if depth == 0:
                return True
            pieces.append(sign)
        elif scan.ended:
            return False
        else:
            yield


def _literal(arguments: str) -> str | None:
    """Keyword arguments as JSON text; None if they are not literals."""
    try:
        call = ast.parse(f"f({arguments})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {keyword.arg: python_value(keyword.value) for keyword in call.keywords if keyword.arg is not None}
        return json.dumps(values, ensure_ascii=False, allow_nan=False) if len(values) == len(call.keywords) else None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
