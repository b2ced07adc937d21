"""Calls as JSON objects, {"name": ..., "arguments": {...}}: one or a list, after a mark or as the whole answer."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass

from quire.api.answers.grammar_writer import GrammarWriter
from quire.api.answers.tools.calls import Schemas, Steps, ToolParser
from quire.api.answers.tools.references import embedded

_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonSyntax:
    """The marks around calls.

    Attributes:
        begins: marks before an object or a list of objects.
        end: the mark after it; empty if there is none.
        bare: the whole answer may be calls without a mark, if it names a known function.
        separator: between objects outside of a list.
        as_list: the model writes a list even for one call.
        arguments: the key of the arguments that the model writes; all known keys are accepted.
    """

    begins: tuple[str, ...] = ()
    end: str = ""
    bare: bool = False
    separator: str = ""
    as_list: bool = False
    arguments: str = "arguments"

    def parse(self, out: ToolParser) -> Steps:
        """Parse an answer."""
        scan = out.scanner
        scan.mark()
        bare = self.bare and (yield from scan.skip_whitespace()) and not (yield from scan.next_is(self.begins))
        if bare and scan.next_character in "[{":
            yield from self.calls(out, known_only=True)
        else:
            out.add_text(scan.since_mark)
        while self.begins:
            mark = yield from scan.read_until(self.begins, out.add_text)
            if mark is None:
                return
            scan.mark()
            yield from self.calls(out, mark=mark)
        yield from scan.read_rest(out.add_text)

    def grammar(self, writer: GrammarWriter, schemas: Schemas, *, parallel: bool) -> str:
        """A grammar expression for calls of these functions."""
        parts, root = embedded(schemas)
        call = writer.json({"anyOf": [self._schema(name, part) for name, part in parts.items()], **root}, spaces=2)
        begin, end = writer.text("".join(self.begins[:1])), writer.text(self.end)
        if self.as_list:
            more = f'("," " "? {call})*' if parallel else ""
            return writer.sequence(begin, '"["', call, more, '"]"', end)
        line = '"\\n"' if self.end.startswith("<") else ""
        one = writer.sequence(begin, line, call, line, end)
        between = writer.text(self.separator or "\n")
        return writer.rule(f"{one} ({between} {one})*") if parallel and (self.separator or self.begins) else one

    def _schema(self, name: str, arguments: object) -> dict[str, object]:
        return {
            "type": "object",
            "properties": {"name": {"const": name}, self.arguments: arguments},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }

    def calls(self, out: ToolParser, *, mark: str = "", known_only: bool = False) -> Steps:
        """Parse calls after a mark; text that is not a call becomes content."""
        scan = out.scanner
        yield from scan.skip_whitespace()
        listed = yield from scan.accept("[")
        yield from scan.skip_whitespace()
        while True:
            begun = yield from _call(out, known_only=known_only)
            if not begun:
                out.add_text(mark + scan.since_mark)
                return
            mark = ""
            scan.mark()
            yield from scan.skip_whitespace()
            if not (yield from scan.accept("," if listed else self.separator or "\0")):
                break
            yield from scan.skip_whitespace()
        if listed:
            yield from scan.accept("]")
            yield from scan.skip_whitespace()
        if self.end:
            yield from scan.accept(self.end)


def _call(out: ToolParser, *, known_only: bool) -> Generator[None, None, bool]:
    """Parse an object; returns whether it was a call, which may be cut off."""
    scan = out.scanner
    if not (yield from scan.accept("{")):
        return False
    has_name, has_arguments, pending = False, False, ""
    while (yield from scan.skip_whitespace()) and not (yield from scan.accept("}")):
        complete, key = yield from scan.read_value()
        yield from scan.skip_whitespace()
        if not complete or not (yield from scan.accept(":")):
            return has_name
        if key == "name" and not has_name:
            complete, name = yield from scan.read_value()
            if not complete or not isinstance(name, str) or not name or (known_only and not out.knows(name)):
                return False
            has_name = True
            out.begin_call(name)
            out.add_arguments(pending)
        elif key in _ARGUMENTS and not has_arguments:
            has_arguments = True
            collected: list[str] = []
            yield from _arguments(out, has_name, collected)
            pending = "".join(collected)
        else:
            yield from scan.read_value()
        yield from scan.skip_whitespace()
        yield from scan.accept(",")
    if has_name and not has_arguments and (not scan.ended or scan.since_mark.rstrip().endswith("}")):
        out.add_arguments("{}")
    return has_name


def _arguments(out: ToolParser, has_name: bool, collected: list[str]) -> Steps:
    """Parse arguments: a JSON object is reported unchanged, a string is reported as its content, null as `{}`."""
    scan = out.scanner
    sink = out.add_arguments if has_name else collected.append
    if (yield from scan.skip_whitespace()) and scan.next_character == "{":
        yield from scan.read_json(sink)
        return
    complete, value = yield from scan.read_value()
    if complete:
        text = value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        sink(text if text not in ("", "null") else "{}")
