"""Calls whose arguments stand between tags, each as a plain text (Qwen3 Coder, GLM, MiniMax, Seed)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.api.answers.grammar_writer import GrammarWriter
from quire.api.answers.tools.calls import Schemas, Steps, ToolParser


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedForm:
    """The tags.

    Attributes:
        wrapper: around a call or several; empty ones are none.
        function: before the name, behind it, and behind the call. A name with no mark behind it ends with its line.
        parameter: before an argument's name, behind it, and behind its value.
        value: before the value, if that is another tag than the one behind the name.
        padded: values stand on lines of their own.
    """

    wrapper: tuple[str, str] = ("", "")
    function: tuple[str, str, str]
    parameter: tuple[str, str, str]
    value: str = ""
    padded: bool = True

    def parse(self, out: ToolParser) -> Steps:
        """Read an answer."""
        scan = out.scanner
        marks = tuple(mark for mark in (*self.wrapper, self.function[0]) if mark)
        while (mark := (yield from scan.until(marks, out.say))) is not None:
            if mark != self.function[0]:
                continue
            scan.note()
            pieces: list[str] = []
            if self.function[1]:
                found = (yield from scan.until((self.function[1],), pieces.append)) is not None
            else:
                pieces.append((yield from scan.word("\n<")))
                found = bool(scan.held)
            name = "".join(pieces).strip().strip('"')
            if not found or not name:
                out.say(mark + scan.noted)
                continue
            out.begin(name)
            yield from self._arguments(out, _properties(out.schemas, name))

    def grammar(self, writer: GrammarWriter, schemas: Schemas, *, several: bool) -> str:
        """An expression for one or more calls of these functions."""
        calls = []
        for name, schema in schemas.items():
            required = schema.get("required") or ()
            pieces = [
                self._argument(writer, key, of, needed=key in required)
                for key, of in _properties(schemas, name).items()
            ]
            head = self.function[0] + name + (self.function[1] or "")
            calls.append(writer.sequence(writer.text(head + "\n"), *pieces, writer.text(self.function[2])))
        first, last = (writer.text(mark and mark + "\n") for mark in self.wrapper)
        whole = writer.sequence(first, writer.either(calls), last)
        return writer.rule(f"{whole}+") if several else whole

    def _argument(self, writer: GrammarWriter, key: str, schema: Mapping[str, Any], *, needed: bool) -> str:
        line = "\n" if self.padded else ""
        head = self.parameter[0] + key + self.parameter[1] + (f"\n{self.value}" if self.value else "") + line
        close = line + self.parameter[2]
        if "enum" in schema and _is_text(schema):
            value = f"{writer.choice(schema['enum'])} {writer.text(close)}"
        elif _is_text(schema):
            pattern = _whole_pattern(schema)
            value = writer.until(close) if pattern is None else writer.matching(pattern, close)
        else:
            value = f"{writer.json(schema, spaces=2)} {writer.text(close)}"
        rule = writer.sequence(writer.text(head), value, writer.text("\n"))
        return rule if needed else f"{rule}?"

    def _arguments(self, out: ToolParser, properties: Mapping[str, Any]) -> Steps:
        scan, count = out.scanner, 0
        before, behind, _ = self.parameter
        while True:
            mark = yield from scan.until((before, self.function[2]), lambda _: None)
            if mark != before:
                break
            pieces: list[str] = []
            if (yield from scan.until((behind,), pieces.append)) is None:
                return
            if self.value and (yield from scan.until((self.value,), lambda _: None)) is None:
                return
            key = "".join(pieces).strip().strip('"')
            out.argue(("{" if count == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            count += 1
            if not (yield from self._value(out, properties.get(key))):
                return
        if mark is not None:
            out.argue("}" if count else "{}")

    def _value(self, out: ToolParser, schema: Any) -> Any:
        """Reads one value; whether it was complete. Texts are told as they come."""
        scan, close = out.scanner, self.parameter[2]
        if isinstance(schema, Mapping) and _is_text(schema):
            text = _Unpadded(out)
            out.argue('"')
            complete = (yield from scan.until((close,), text.add)) is not None
            if complete:
                out.argue('"')
            return complete
        pieces: list[str] = []
        if (yield from scan.until((close,), pieces.append)) is None:
            return False
        out.argue(_as_json("".join(pieces)))
        return True


class _Unpadded:
    """A text as the inside of a JSON string, without the line breaks that tags put around it."""

    def __init__(self, out: ToolParser) -> None:
        self._out = out
        self._begun = False
        self._held = ""

    def add(self, text: str) -> None:
        """More of it."""
        if not text:
            return
        if not self._begun:
            text = text.removeprefix("\n")
            self._begun = True
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._out.argue(json.dumps(text.removesuffix("\n"), ensure_ascii=False)[1:-1])


def _properties(schemas: Schemas, name: str) -> Mapping[str, Any]:
    properties = schemas.get(name, {}).get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _is_text(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string" or ("enum" in schema and all(isinstance(one, str) for one in schema["enum"]))


def _whole_pattern(schema: Mapping[str, Any]) -> str | None:
    """A regular expression of the whole text, if the schema has one that says so."""
    found = re.fullmatch(r"\^\(\?:(.*)\)\$", str(schema.get("pattern", "")), re.DOTALL)
    if found is None:
        return None
    try:
        re.compile(found[1])
    except re.error:  # the brackets are no pair
        return None
    return found[1]


def _as_json(text: str) -> str:
    """A value whose type is not known to be text: JSON if it is some, else text."""
    stripped = text.strip()
    if stripped in ("True", "False", "None"):
        return {"True": "true", "False": "false", "None": "null"}[stripped]
    try:
        return json.dumps(json.loads(stripped, parse_constant=_refuse), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(text.removeprefix("\n").removesuffix("\n"), ensure_ascii=False)


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
