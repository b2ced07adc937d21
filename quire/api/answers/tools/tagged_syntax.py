"""Calls whose arguments are plain text between tags (Qwen3 Coder, GLM, MiniMax, Seed)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.api.answers.grammar_writer import GrammarWriter
from quire.api.answers.tools.calls import Schemas, Steps, ToolParser

_MAX_REFERENCES = 8  # that are followed; longer chains are left to the grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedSyntax:
    """The tags.

    Attributes:
        wrapper: around one or more calls; empty if there are none.
        function: before the name, after it, and after the call. A name without a tag after it ends with its line.
        parameter: before the name of an argument, after it, and after its value.
        value: before the value, in addition to the tag after the name; empty if there is none.
        padded: values are on lines of their own.
    """

    wrapper: tuple[str, str] = ("", "")
    function: tuple[str, str, str]
    parameter: tuple[str, str, str]
    value: str = ""
    padded: bool = True

    def parse(self, out: ToolParser) -> Steps:
        """Parse an answer."""
        scan = out.scanner
        marks = tuple(mark for mark in (*self.wrapper, self.function[0]) if mark)
        while (mark := (yield from scan.read_until(marks, out.add_text))) is not None:
            if mark != self.function[0]:
                continue
            scan.mark()
            pieces: list[str] = []
            if self.function[1]:
                found = (yield from scan.read_until((self.function[1],), pieces.append)) is not None
            else:
                pieces.append((yield from scan.read_word("\n<")))
                found = bool(scan.next_character)
            name = "".join(pieces).strip().strip('"')
            if not found or not name:
                out.add_text(mark + scan.since_mark)
                continue
            out.begin_call(name)
            yield from self._arguments(out, _properties(out.schemas, name))

    def grammar(self, writer: GrammarWriter, schemas: Schemas, *, parallel: bool) -> str:
        """A grammar expression for calls of these functions.

        Raises:
            ValueError: a schema is not valid.
        """
        calls = []
        for name, schema in schemas.items():
            required = _required(schema, name)
            pieces = [
                self._argument(writer, key, of, needed=key in required)
                for key, of in _checked_properties(schema, name).items()
            ]
            before, after, end = map(writer.text, (self.function[0], self.function[1] + "\n", self.function[2]))
            calls.append(writer.sequence(before, writer.plain(name), after, *pieces, end))
        first, last = (writer.text(mark and mark + "\n") for mark in self.wrapper)
        section = writer.sequence(first, writer.either(calls), last)
        return writer.rule(f"{section}+") if parallel else section

    def _argument(self, writer: GrammarWriter, key: str, schema: Any, *, needed: bool) -> str:
        line = "\n" if self.padded else ""
        before, after = self.parameter[0], self.parameter[1] + (f"\n{self.value}" if self.value else "") + line
        close = line + self.parameter[2]
        if _is_text(schema) and "enum" in schema:
            value = f"{writer.choice(_texts(schema['enum'], key))} {writer.text(close)}"
        elif _is_text(schema):
            pattern = _anchored_pattern(schema)
            value = writer.until(close) if pattern is None else writer.matching(pattern, close)
        else:
            value = f"{writer.json(schema, spaces=2)} {writer.text(close)}"
        rule = writer.sequence(writer.text(before), writer.plain(key), writer.text(after), value, writer.text("\n"))
        return rule if needed else f"{rule}?"

    def _arguments(self, out: ToolParser, properties: Mapping[str, Any]) -> Steps:
        scan, count = out.scanner, 0
        before, after, _ = self.parameter
        while True:
            mark = yield from scan.read_until((before, self.function[2]), lambda _: None)
            if mark != before:
                break
            pieces: list[str] = []
            if (yield from scan.read_until((after,), pieces.append)) is None:
                return
            if self.value and (yield from scan.read_until((self.value,), lambda _: None)) is None:
                return
            key = "".join(pieces).strip().strip('"')
            out.add_arguments(("{" if count == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            count += 1
            if not (yield from self._value(out, properties.get(key))):
                return
        if mark is not None:
            out.add_arguments("}" if count else "{}")

    def _value(self, out: ToolParser, schema: Any) -> Any:
        """Parse a value; returns whether it was complete. Strings are reported as they arrive."""
        scan, close = out.scanner, self.parameter[2]
        if _is_text(schema):
            text = _Unpadded(out)
            out.add_arguments('"')
            complete = (yield from scan.read_until((close,), text.add)) is not None
            if complete:
                out.add_arguments('"')
            return complete
        pieces: list[str] = []
        if (yield from scan.read_until((close,), pieces.append)) is None:
            return False
        out.add_arguments(_as_json("".join(pieces)))
        return True


class _Unpadded:
    """Reports a string as it arrives, escaped for JSON, and without the line breaks next to its tags."""

    def __init__(self, out: ToolParser) -> None:
        self._out = out
        self._started = False
        self._buffer = ""

    def add(self, text: str) -> None:
        """Add text."""
        if not text:
            return
        if not self._started:
            text = text.removeprefix("\n")
            self._started = True
        text = self._buffer + text
        self._buffer = "\n" if text.endswith("\n") else ""
        self._out.add_arguments(json.dumps(text.removesuffix("\n"), ensure_ascii=False)[1:-1])


def _properties(schemas: Schemas, name: str) -> Mapping[str, Any]:
    schema = schemas.get(name, {})
    properties = schema.get("properties")
    return _resolved(properties, schema) if isinstance(properties, Mapping) else {}


def _checked_properties(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping | None):
        raise ValueError(f"The `properties` of the tool {name!r} must be an object.")
    return _resolved(properties or {}, schema)


def _resolved(properties: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemas of arguments by themselves: with the definitions of the tool's schema."""
    definitions = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema.get(key), Mapping)}
    if not definitions:
        return properties
    return {
        key: _with_definitions(_definition(of, definitions), definitions) if isinstance(of, Mapping) else of
        for key, of in properties.items()
    }


def _with_definitions(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**schema, **definitions} if _has_reference(schema) else schema


def _has_reference(schema: Any) -> bool:
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            if "$ref" in one or "$dynamicRef" in one:
                return True
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)
    return False


def _definition(schema: Mapping[str, Any], definitions: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The definition that a schema refers to, with what the schema adds."""
    for _ in range(_MAX_REFERENCES):
        place, _, name = str(schema.get("$ref", "")).removeprefix("#/").partition("/")
        found = definitions.get(place, {}).get(name)
        if not isinstance(found, Mapping):
            break
        schema = {**found, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def _required(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    required = schema.get("required")
    if not isinstance(required, list | None):
        raise ValueError(f"`required` of the tool {name!r} must be an array.")
    return frozenset(each for each in required or () if isinstance(each, str))


def _texts(enum: Any, key: str) -> list[str]:
    """The values of an enum of strings."""
    texts = [value for value in enum if isinstance(value, str)] if isinstance(enum, list) else []
    if not texts:
        raise ValueError(f"The `enum` of the string {key!r} must be an array that contains strings.")
    return texts


def _is_text(schema: Any) -> bool:
    """Whether values are written as plain text. `schema`: as the client sent it, so of any type."""
    if not isinstance(schema, Mapping):
        return False
    enum = schema.get("enum")
    return schema.get("type") == "string" or (isinstance(enum, list) and all(isinstance(one, str) for one in enum))


def _anchored_pattern(schema: Mapping[str, Any]) -> str | None:
    """The pattern of a schema, if it is anchored at both ends."""
    found = re.fullmatch(r"\^\(\?:(.*)\)\$", str(schema.get("pattern", "")), re.DOTALL)
    if found is None:
        return None
    try:
        re.compile(found[1])
    except re.error:  # not the anchors of one group
        return None
    return found[1]


def _as_json(text: str) -> str:
    """A value that is not known to be a string, as JSON: unchanged if it is valid JSON, otherwise as a string."""
    stripped = text.strip()
    if stripped in ("True", "False", "None"):
        return {"True": "true", "False": "false", "None": "null"}[stripped]
    try:
        return json.dumps(json.loads(stripped, parse_constant=_refuse), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(text.removeprefix("\n").removesuffix("\n"), ensure_ascii=False)


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
