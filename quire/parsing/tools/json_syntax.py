"""Calls as JSON objects, {"name": ..., "arguments": {...}}: one or a list, after a mark or anywhere in the answer."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass

from quire.parsing.grammar_writer import GrammarWriter
from quire.parsing.tools.calls import Schemas, Steps, ToolParser
from quire.parsing.tools.references import embed_schemas
from quire.parsing.tools.scanner import Sink

_ARGUMENTS = ("arguments", "parameters")
_BESIDE_NAMES = frozenset({*_ARGUMENTS, "id", "type"})  # keys that may precede the name in an object without a mark
_CODE = "```"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonSyntax:
    """The marks around calls.

    Attributes:
        begins: marks before an object or a list of objects.
        end: the mark after it; empty if there is none.
        others: further marks before and after it, which are read but not written.
        bare: calls may be anywhere in the answer without a mark, if they name a known function.
        separator: text between objects outside of a list.
        as_list: the model writes a list even for one call.
        lines: the model writes several calls on lines between one pair of marks.
        name, arguments: the keys that the model writes; all known keys of arguments are accepted. Without a key for the
            name, the name is the key of the arguments.
        call_id: the key of an id, which the model writes first; empty if it writes none.
        skipped: marks around text in which calls are not looked for; empty if there are none.
        dropped: marks between messages, which are not content.
    """

    begins: tuple[str, ...] = ()
    end: str = ""
    others: tuple[tuple[str, str], ...] = ()
    bare: bool = False
    separator: str = ""
    as_list: bool = False
    lines: bool = False
    name: str = "name"
    arguments: str = "arguments"
    call_id: str = ""
    skipped: tuple[str, str] = ("", "")
    dropped: tuple[str, ...] = ()

    def parse(self, out: ToolParser) -> Steps:
        """Parse an answer."""
        scan = out.scanner
        ends = {**dict.fromkeys(self.begins, self.end), **dict(self.others)}
        scan.stop_json_at((*ends, *ends.values()))
        marks = tuple(filter(None, (*ends, *("{[" if self.bare else ""), *self.skipped[:1], *self.dropped)))
        while (mark := (yield from scan.read_until(marks, out.add_text))) is not None:
            if mark == self.skipped[0]:
                out.add_text(mark)
                out.add_text((yield from scan.read_until((self.skipped[1],), out.add_text)) or "")
            elif mark in self.dropped:
                out.begin_text()
            elif mark in ends:
                scan.mark()
                known_only = mark.startswith(_CODE)  # any JSON may be in a block of code
                yield from self.calls(out, mark=mark, end=ends[mark], known_only=known_only)
            else:
                scan.unread(mark)
                scan.mark()
                yield from self.calls(out, known_only=True)

    def grammar(self, writer: GrammarWriter, schemas: Schemas, *, parallel: bool) -> str:
        """A grammar expression for calls of these functions."""
        parts, root = embed_schemas(schemas)
        call = writer.json({"anyOf": [self._schema(name, part) for name, part in parts.items()], **root}, spaces=2)
        begins = [begin for begin in self.begins if writer.has_special(begin)] or self.begins
        begin = writer.text("".join(begins[:1]))
        end = writer.text(self.end)
        if self.as_list:
            more = f'("," " "? {call})*' if parallel else ""
            return writer.sequence(begin, '"["', call, more, '"]"', end)
        line = '"\\n"' if self.end.startswith("<") else ""
        if self.lines:
            more = f'("\\n" {call})*' if parallel else ""
            return writer.sequence(begin, line, call, more, line, end)
        line_of_call = writer.sequence(begin, line, call, line, end)
        between = writer.text(self.separator or "\n")
        if parallel and (self.separator or self.begins):
            return writer.rule(f"{line_of_call} ({between} {line_of_call})*")
        return line_of_call

    def _schema(self, name: str, arguments: object) -> dict[str, object]:
        properties: dict[str, object] = {self.name: {"const": name}, self.arguments: arguments}
        if not self.name:
            properties = {name: arguments}
        elif self.call_id:
            properties = {self.call_id: {"type": "string", "pattern": "^[0-9]{1,4}$"}, **properties}
        return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}

    def calls(self, out: ToolParser, *, mark: str = "", end: str = "", known_only: bool = False) -> Steps:
        """Parse calls after a mark; text that is not a call becomes content."""
        scan = out.scanner
        yield from scan.skip_whitespace()
        listed = yield from scan.accept("[")
        yield from scan.skip_whitespace()
        while True:
            begun, depth = yield from self._call(out, known_only=known_only)
            if not begun:
                out.add_text(mark + scan.since_mark)
                if known_only and depth:  # objects inside of other JSON are not calls
                    yield from scan.read_json(out.add_text, depth=depth + listed)
                if not self.lines or (yield from scan.read_until(("{", end), out.add_text)) != "{":
                    return
                scan.unread("{")
            mark = ""
            scan.mark()
            if begun and not (yield from self._continues(out, listed)):
                break
        if listed:
            yield from scan.accept("]")
            yield from scan.skip_whitespace()
        if end and not (yield from scan.accept(end)):
            scan.mark()
            while (yield from scan.skip_whitespace()) and scan.next_character in "]}":  # more than were opened
                scan.take(1)
            if not (yield from scan.accept(end)):
                out.add_text(scan.since_mark)

    def _continues(self, out: ToolParser, listed: bool) -> Generator[None, None, bool]:
        """Return whether another object follows a call."""
        scan = out.scanner
        yield from scan.skip_whitespace()
        separated = yield from scan.accept("," if listed else self.separator or "\0")
        yield from scan.skip_whitespace()
        if scan.next_character == "{":
            return True
        if separated and not listed:
            out.add_text(scan.since_mark)
        return False

    def _call(self, out: ToolParser, *, known_only: bool) -> Generator[None, None, tuple[bool, int]]:
        """Parse an object; returns whether it was a call, which may be cut off, and the nesting depth at its end."""
        scan = out.scanner
        if not (yield from scan.accept("{")):
            return False, 0
        has_name = False
        has_arguments = False
        pending = ""
        while (yield from scan.skip_whitespace()) and not (yield from scan.accept("}")):
            complete, key = yield from scan.read_value()
            yield from scan.skip_whitespace()
            if not complete or not (yield from scan.accept(":")):
                return has_name, 1
            if not self.name and isinstance(key, str) and key:
                has_name = has_arguments = True
                out.begin_call(key)
                yield from read_arguments(out, out.add_arguments)
            elif key == self.name and not has_name:
                complete, name = yield from scan.read_value()
                if not complete or not isinstance(name, str) or not name or (known_only and not out.knows(name)):
                    return False, 1
                has_name = True
                out.begin_call(name)
                out.add_arguments(pending)
            elif key in (*_ARGUMENTS, self.arguments) and not has_arguments:
                has_arguments = True
                collected: list[str] = []
                yield from read_arguments(out, out.add_arguments if has_name else collected.append)
                pending = "".join(collected)
            elif known_only and not has_name and key not in _BESIDE_NAMES:
                return False, 1
            else:
                yield from scan.read_value()
            yield from scan.skip_whitespace()
            yield from scan.accept(",")
        if has_name and not has_arguments and (not scan.ended or scan.since_mark.rstrip().endswith("}")):
            out.add_arguments("{}")
        return has_name, 0


def read_arguments(out: ToolParser, sink: Sink) -> Steps:
    """Parse arguments: a JSON object is reported unchanged, one in a string as its content, null as `{}`."""
    scan = out.scanner
    if (yield from scan.skip_whitespace()) and scan.next_character == "{":
        yield from scan.read_json(sink)
        return
    complete, value = yield from scan.read_value()
    if complete:
        if isinstance(value, str) and value.lstrip().startswith("{"):
            sink(value.strip())
        else:
            sink("{}" if value in (None, "", "null") else json.dumps(value, ensure_ascii=False))
