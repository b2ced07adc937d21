"""Calls whose arguments are plain text between tags (Qwen3 Coder, GLM, MiniMax M2, DeepSeek V4, Kimi K3 and more)."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quire.parsing.grammar_writer import GrammarWriter
from quire.parsing.tools.calls import Schemas, Steps, ToolParser
from quire.parsing.tools.json_syntax import JsonSyntax
from quire.parsing.tools.references import resolve_reference, standalone_parts, standalone_schema
from quire.parsing.tools.values import Types, as_json, properties_of, shapes_of, texts_of, types_of

_TEXT = frozenset({"string"})  # types of a value that is written as plain text
# Escapes, classes of characters, and the characters that matter outside of these.
_PATTERN_PART = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]|[()|]", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedSyntax:
    """The tags.

    Attributes:
        wrapper: marks around one or more calls; empty if there are none.
        around: marks around each call.
        function: texts before the name, after it, and after the call. A name without a tag after it ends with its line.
        parameter: texts before the name of an argument, after it, and after its value.
        value: text before the value, in addition to the tag after the name; empty if there is none.
        padded: values are on separate lines.
        typed: an attribute after the name of an argument says whether its value is a string.
        cdata: marks around a value that may contain any text; empty if there are none.
        json_after: a mark that a JSON object may follow, which is a call as well; empty if there is none.
    """

    wrapper: tuple[str, str] = ("", "")
    around: tuple[str, str] = ("", "")
    function: tuple[str, str, str]
    parameter: tuple[str, str, str]
    value: str = ""
    padded: bool = True
    typed: bool = False
    cdata: tuple[str, str] = ("", "")
    json_after: str = ""

    def parse(self, out: ToolParser) -> Steps:
        """Parse an answer."""
        yield from self.parse_until(out, ())

    def parse_until(self, out: ToolParser, ends: tuple[str, ...]) -> Steps:
        """Parse an answer up to one of the marks, outside of a call."""
        scan = out.scanner
        outer = tuple(mark for mark in (*self.wrapper, *self.around) if mark)
        marks = (*outer, self.function[0], *ends)
        mark = yield from scan.read_until(marks, out.add_text)
        while mark is not None and mark not in ends:
            if mark == self.json_after and (yield from self._json_call(out, mark)):
                mark = ""
            elif mark == self.function[0]:
                mark = yield from self._call(out)
            if mark != self.function[0]:
                if mark in outer:
                    out.begin_text()
                mark = yield from scan.read_until(marks, out.add_text)

    def _json_call(self, out: ToolParser, mark: str) -> Generator[None, None, bool]:
        """Parse a JSON object if it comes next; returns whether it did."""
        out.scanner.mark()
        if not (yield from out.scanner.skip_whitespace()) or out.scanner.next_character != "{":
            return False
        end = self.wrapper[1] if mark == self.wrapper[0] else self.function[2]
        yield from JsonSyntax().calls(out, mark=mark, end=end)
        return True

    def _call(self, out: ToolParser) -> Generator[None, None, str | None]:
        """Parse a call; returns the mark that ended it, which may be the begin of the next call."""
        scan = out.scanner
        scan.mark()
        pieces: list[str] = []
        mark: str | None = ""
        if self.function[1]:
            mark = yield from scan.read_until((self.function[1], *self._breaks), pieces.append)
        else:
            pieces.append((yield from scan.read_word("\n<")))
        name = "".join(pieces).strip().removeprefix('"').partition('"')[0]
        complete = mark == self.function[1] and (bool(mark) or bool(scan.next_character))
        if not name or (not complete and (mark is None or not out.knows(name))):  # a tag that is not closed is no call
            read = scan.since_mark
            out.add_text(self.function[0] + (read.removesuffix(mark) if mark == self.function[0] else read))
            return mark if mark == self.function[0] else ""
        out.begin_call(name)
        return (yield from self._arguments(out, out.schemas.get(name, {}), mark if mark in self._breaks else ""))

    def grammar(self, writer: GrammarWriter, schemas: Schemas, *, parallel: bool) -> str:
        """A grammar expression for calls of these functions.

        Raises:
            ValueError: a schema is not valid.
        """
        calls = []
        for name, schema in schemas.items():
            standalone_schema(name, schema)  # all references lead somewhere
            before, after, end = map(writer.text, self._tags())
            shapes = writer.either(
                writer.sequence(*self._parameters(writer, shape, schema, name)) for shape in shapes_of(schema)
            )
            calls.append(writer.sequence(before, writer.plain(name), after, shapes, end))
        first, last = (writer.text(mark and mark + "\n") for mark in self.wrapper)
        section = writer.sequence(first, writer.either(calls), last)
        return writer.rule(f"{section}+") if parallel else section

    def _parameters(self, writer: GrammarWriter, shape: Any, schema: Mapping[str, Any], name: str) -> Iterator[str]:
        """Expressions for the arguments of an object's schema."""
        if not isinstance(shape, Mapping):
            return
        required, properties = shape.get("required"), shape.get("properties")
        if not isinstance(properties, Mapping | None):
            raise ValueError(f"The `properties` of the tool {name!r} must be an object.")
        if not isinstance(required, list | None):
            raise ValueError(f"`required` of the tool {name!r} must be an array.")
        alone = standalone_parts(name, schema, (properties or {}).values())
        for (key, part), schema_alone in zip((properties or {}).items(), alone, strict=True):
            rule = self._argument(writer, key, schema_alone, resolve_reference(part, schema), schema)
            yield rule if key in (required or ()) else f"{rule}?"

    def _argument(self, writer: GrammarWriter, key: str, alone: Any, part: Any, schema: Mapping[str, Any]) -> str:
        """An expression for an argument. `alone`: its schema as a separate schema; `part`: as a part of the tool's."""
        line = "\n" if self.padded else ""
        is_text = types_of(part, schema) == _TEXT
        attribute = f'" string="{str(is_text).lower()}' if self.typed else ""
        value = f"\n{self.value}" if self.value else ""
        before = self.parameter[0]
        after = attribute + self.parameter[1] + value + line
        close = line + self.parameter[2]
        if not is_text:
            value = f"{writer.json(alone, spaces=2)} {writer.text(close)}"
        elif (texts := texts_of(part, schema, key)) is not None:
            value = f"{writer.choice(texts)} {writer.text(close)}"
        elif (pattern := _whole_pattern(part)) is not None:
            value = writer.matching(pattern, close)
        else:
            value = writer.until(close)
        return writer.sequence(writer.text(before), writer.plain(key), writer.text(after), value, writer.text("\n"))

    def _arguments(
        self, out: ToolParser, schema: Mapping[str, Any], mark: str | None
    ) -> Generator[None, None, str | None]:
        """Parse the arguments to the end of the call; returns the mark that ended it. `mark`: already read."""
        scan = out.scanner
        properties = properties_of(schema)
        count = 0
        before, after, _ = self.parameter
        marks = self._breaks
        if not mark:
            mark = yield from scan.read_until(marks, lambda _: None)
        while mark == before:
            pieces: list[str] = []
            mark = yield from scan.read_until((after,), pieces.append)
            if mark is not None and self.value:
                mark = yield from scan.read_until((self.value, *marks), lambda _: None)
            if mark is not None and mark in marks:
                continue  # an argument without a value
            if mark is None:
                return None
            key, _, attribute = "".join(pieces).strip().removeprefix('"').partition('"')
            types = types_of(properties.get(key), schema)
            types = _TEXT if types is None and ('"true"' in f'{attribute}"' or '"string"' in attribute) else types
            out.add_arguments(("{" if count == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            count += 1
            mark = yield from self._value(out, types)
            if mark == self.parameter[2]:
                mark = yield from scan.read_until(marks, lambda _: None)
        if mark is not None:
            out.add_arguments("}" if count else "{}")
        return mark

    def _value(self, out: ToolParser, types: Types) -> Generator[None, None, str | None]:
        """Parse a value; returns the mark that ended it. Strings are reported as they arrive."""
        # A value that is not closed ends where the next argument begins, or with its call.
        marks = (self.parameter[2], *(f"\n{mark}" for mark in self._breaks))
        if self.cdata[0] and (yield from out.scanner.accept(self.cdata[0])):
            marks = (self.cdata[1] + self.parameter[2],)
        if types == _TEXT:
            out.add_arguments('"')
            mark = yield from out.scanner.read_until(marks, _StringWriter(out, padded=self.padded).add)
            if mark is not None:
                out.add_arguments('"')
        else:
            pieces: list[str] = []
            mark = yield from out.scanner.read_until(marks, pieces.append)
            if mark is not None:
                text = "".join(pieces)
                out.add_arguments(as_json(text.removeprefix("\n").removesuffix("\n") if self.padded else text, types))
        return None if mark is None else mark.removeprefix("\n").removeprefix(self.cdata[1])

    def _tags(self) -> tuple[str, str, str]:
        """The texts before the name, after it, and after the arguments."""
        before, after, end = self.function
        return self.around[0] + before, after + "\n", end + self.around[1]

    @property
    def _breaks(self) -> tuple[str, ...]:
        """The marks of the next argument, of the end of the call, and of the next call."""
        return tuple(mark for mark in (self.parameter[0], self.function[2], self.function[0], self.wrapper[1]) if mark)


class _StringWriter:
    """Report a string as it arrives, escaped for JSON; without the line breaks next to its tags if it is padded."""

    def __init__(self, out: ToolParser, *, padded: bool) -> None:
        self._out = out
        self._padded = padded
        self._started = False
        self._buffer = ""

    def add(self, text: str) -> None:
        """Add text."""
        if not text:
            return
        if not self._padded:
            self._out.add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            return
        if not self._started:
            text = text.removeprefix("\n")
            self._started = True
        text = self._buffer + text
        self._buffer = "\n" if text.endswith("\n") else ""
        self._out.add_arguments(json.dumps(text.removesuffix("\n"), ensure_ascii=False)[1:-1])


def _whole_pattern(schema: Mapping[str, Any]) -> str | None:
    """The pattern of a schema without its anchors, if it is anchored at both ends."""
    match = re.fullmatch(r"\^((?:[^\\]|\\.)*)\$", str(schema.get("pattern", "")), re.DOTALL)
    if match is None or _has_alternatives(match[1]):  # the anchors belong to one of them each
        return None
    try:
        re.compile(match[1])
    except re.error:
        return None
    return match[1]


def _has_alternatives(pattern: str) -> bool:
    """Return whether a regular expression has `|` outside of groups."""
    depth = 0
    for match in _PATTERN_PART.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if match[0] == "|" and depth == 0:
            return True
    return False
