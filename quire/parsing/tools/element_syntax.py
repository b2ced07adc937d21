"""Calls whose arguments are nested elements, each tag after a mark (MiniMax M3)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.parsing.tools.calls import Steps, ToolParser
from quire.parsing.tools.references import resolve_reference
from quire.parsing.tools.values import additional_properties_of, as_json, properties_of, types_of

_MAX_DEPTH = 128  # of elements in elements
_TEXT = frozenset({"string"})
_MIXED = "$text"  # key of the text beside the elements of an object


@dataclass(slots=True)
class _Element:
    name: str
    text: str = ""
    children: list[_Element] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementSyntax:
    """The mark before each tag; `begins` and `ends`: tags around calls, without the mark."""

    mark: str
    begins: tuple[str, str] = ("<tool_call>", "</tool_call>")
    call: tuple[str, str] = ("<invoke name=", "</invoke>")

    def parse(self, out: ToolParser) -> Steps:
        """Parse an answer. The arguments of a call are reported at its end: a repeated element makes a list."""
        scan = out.scanner
        around, (begin, end) = tuple(self.mark + tag for tag in self.begins), (self.mark + tag for tag in self.call)
        mark = yield from scan.read_until((*around, begin), out.add_text)
        while mark is not None:
            if mark != begin:
                out.begin_text()
                mark = yield from scan.read_until((*around, begin), out.add_text)
                continue
            scan.mark()
            header: list[str] = []
            closed = yield from scan.read_until((">", self.mark), header.append)
            name = "".join(header).strip().strip("\"'")
            if closed != ">" or not name:
                out.add_text(begin + scan.since_mark)
                mark = yield from scan.read_until((*around, begin), out.add_text)
                continue
            out.begin_call(name)
            body: list[str] = []
            mark = yield from scan.read_until((end, begin, around[1]), body.append)
            schema = out.schemas.get(name, {})
            values = _object(_elements("".join(body), self.mark), schema, schema)
            arguments = json.dumps(values, ensure_ascii=False)
            out.add_arguments(arguments[:-1] if mark is None else arguments)
            if mark == end:
                mark = yield from scan.read_until((*around, begin), out.add_text)


def _elements(text: str, mark: str) -> list[_Element]:
    """The complete elements of a text, up to the first tag that does not fit."""
    stack = [_Element("")]
    for part in text.split(mark)[1:]:
        tag, closed, after = part.partition(">")
        if not closed or not tag.startswith("<"):
            break
        if not tag.startswith("</"):
            if len(stack) > _MAX_DEPTH:
                break
            element = _Element(tag[1:].strip(), after)
            stack[-1].children.append(element)
            stack.append(element)
        elif len(stack) > 1 and tag[2:].strip() == stack[-1].name:
            stack.pop()
            stack[-1].text += after
        else:
            break
    elements = stack[0].children
    return elements if len(stack) == 1 else elements[:-1]


def _object(elements: Iterable[_Element], shape: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Elements as an object; those with the same name become a list. `shape`: its schema; `schema`: see `_value`."""
    properties, others = properties_of(shape), additional_properties_of(shape)
    values: dict[str, list[Any]] = {}
    for element in elements:
        values.setdefault(element.name, []).append(_value(element, properties.get(element.name, others), schema))
    return {name: same_name if len(same_name) > 1 else same_name[0] for name, same_name in values.items()}


def _value(element: _Element, part: Any, schema: Mapping[str, Any]) -> Any:
    """The value of an element. `part`: its schema, as the client sent it; `schema`: what references point into."""
    types, part = types_of(part, schema), resolve_reference(part, schema)
    shape = part if isinstance(part, Mapping) else {}
    if element.children and types is not None and "array" in types:
        items = shape.get("items")
        return [_value(child, items, schema) for child in element.children]
    if element.children:
        values = _object(element.children, shape, schema)
        return {**values, _MIXED: element.text} if element.text.strip() else values
    if not element.text.strip() and types is not None and "string" not in types:
        empty: Any = {} if "object" in types else None
        return [] if "array" in types else empty
    return element.text if types == _TEXT else json.loads(as_json(element.text, types))
