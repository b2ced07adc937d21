"""Calls as JSON objects, {"name": ..., "arguments": {...}}: alone or in a list, behind a mark or as all there is."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass

from quire.api.answers.grammar_writer import GrammarWriter
from quire.api.answers.tools.calls import Schemas, Steps, ToolParser

_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonForm:
    """How a model marks its calls.

    Attributes:
        begins: marks before an object or a list of objects.
        end: the mark behind; empty: none.
        bare: the whole answer may be calls without a mark, if it names a known function.
        separator: between objects that are in no list.
        as_list: the model writes a list even for one call.
        arguments: the key that the model writes; all known ones are read.
    """

    begins: tuple[str, ...] = ()
    end: str = ""
    bare: bool = False
    separator: str = ""
    as_list: bool = False
    arguments: str = "arguments"

    def parse(self, out: ToolParser) -> Steps:
        """Read an answer."""
        scan = out.scanner
        scan.note()
        bare = self.bare and (yield from scan.blanks()) and not (yield from scan.sees(self.begins))
        if bare and scan.held[0] in "[{":
            yield from self.calls(out, known_only=True)
        else:
            out.say(scan.noted)
        while self.begins:
            mark = yield from scan.until(self.begins, out.say)
            if mark is None:
                return
            scan.note()
            yield from self.calls(out, mark=mark)
        yield from scan.until(("\0",), out.say)

    def grammar(self, writer: GrammarWriter, schemas: Schemas, *, several: bool) -> str:
        """An expression for one or more calls of these functions."""
        call = writer.json({"anyOf": [self._schema(name, schema) for name, schema in schemas.items()]}, spaces=2)
        begin, end = writer.text("".join(self.begins[:1])), writer.text(self.end)
        if self.as_list:
            more = f'("," " "? {call})*' if several else ""
            return writer.sequence(begin, '"["', call, more, '"]"', end)
        line = '"\\n"' if self.end.startswith("<") else ""
        one = writer.sequence(begin, line, call, line, end)
        between = writer.text(self.separator or "\n")
        return writer.rule(f"{one} ({between} {one})*") if several and (self.separator or self.begins) else one

    def _schema(self, name: str, arguments: object) -> dict[str, object]:
        return {
            "type": "object",
            "properties": {"name": {"const": name}, self.arguments: arguments},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }

    def calls(self, out: ToolParser, *, mark: str = "", known_only: bool = False) -> Steps:
        """Calls behind a mark; what is none is said."""
        scan = out.scanner
        yield from scan.blanks()
        listed = yield from scan.accept("[")
        yield from scan.blanks()
        while True:
            begun = yield from _call(out, known_only=known_only)
            if not begun:
                out.say(mark + scan.noted)
                return
            mark = ""
            scan.note()
            yield from scan.blanks()
            if not (yield from scan.accept("," if listed else self.separator or "\0")):
                break
            yield from scan.blanks()
        if listed:
            yield from scan.accept("]")
            yield from scan.blanks()
        if self.end:
            yield from scan.accept(self.end)


def _call(out: ToolParser, *, known_only: bool) -> Generator[None, None, bool]:
    """Reads an object; whether it was a call, be it one that breaks off."""
    scan = out.scanner
    if not (yield from scan.accept("{")):
        return False
    named, argued, pending = False, False, ""
    while (yield from scan.blanks()) and not (yield from scan.accept("}")):
        complete, key = yield from scan.value()
        yield from scan.blanks()
        if not complete or not (yield from scan.accept(":")):
            return named
        if key == "name" and not named:
            complete, name = yield from scan.value()
            if not complete or not isinstance(name, str) or not name or (known_only and not out.knows(name)):
                return False
            named = True
            out.begin(name)
            out.argue(pending)
        elif key in _ARGUMENTS and not argued:
            argued = True
            collected: list[str] = []
            yield from _arguments(out, named, collected)
            pending = "".join(collected)
        else:
            yield from scan.value()
        yield from scan.blanks()
        yield from scan.accept(",")
    if (named and not argued and not scan.ended) or (named and not argued and scan.noted.rstrip().endswith("}")):
        out.argue("{}")
    return named


def _arguments(out: ToolParser, named: bool, collected: list[str]) -> Steps:
    """Arguments as they are; those that a model wrote as a text are that text, none at all are an empty object."""
    scan = out.scanner
    sink = out.argue if named else collected.append
    if (yield from scan.blanks()) and scan.held[0] == "{":
        yield from scan.json(sink)
        return
    complete, value = yield from scan.value()
    if complete:
        text = value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        sink(text if text not in ("", "null") else "{}")
