"""Values of arguments that models write as plain text or in Python's syntax, as JSON."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from quire.parsing.tools.references import resolve_reference

_MAX_DEPTH = 8  # of alternatives in alternatives
_CONSTANTS = {"true": True, "false": False, "null": None}
_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}
_NUMBERS = frozenset({"integer", "number"})
_DECIMAL = re.compile(r"[+-]?\d+(?:\.\d*)?", re.ASCII)  # also with zeros before it, which JSON does not allow
_UNREADABLE = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)

Types = frozenset[str] | None  # JSON types; None: any


def types_of(part: Any, schema: Mapping[str, Any], depth: int = 0) -> Types:
    """The types that a part of a schema allows.

    Args:
        part: the part as the client sent it, so of any type.
        schema: the schema that references point into.
        depth: number of alternatives around the part.
    """
    part = resolve_reference(part, schema)
    if not isinstance(part, Mapping) or depth > _MAX_DEPTH:
        return None
    kind = part.get("type")
    if isinstance(kind, str | list):
        return frozenset(option for option in ([kind] if isinstance(kind, str) else kind) if isinstance(option, str))
    values = part.get("enum", [part["const"]] if "const" in part else None)
    if isinstance(values, list):
        return frozenset(_type_of(value) for value in values)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(part.get(keyword), list):
            known = [types_of(option, schema, depth + 1) for option in part[keyword]]
            return (
                frozenset[str]().union(*(option for option in known if option is not None))
                if None not in known
                else None
            )
    combined = part.get("allOf")
    combined = [types_of(option, schema, depth + 1) for option in combined] if isinstance(combined, list) else []
    return next((option for option in combined if option is not None), None)


def texts_of(part: Any, schema: Mapping[str, Any], key: str, depth: int = 0) -> list[str] | None:
    """The only texts that a string may be; None if there are others.

    Raises:
        ValueError: there is a list of values, but no text in it.
    """
    part = resolve_reference(part, schema)
    if not isinstance(part, Mapping) or depth > _MAX_DEPTH:
        return None
    if "enum" in part or "const" in part:
        values = part.get("enum", [part.get("const")])
        texts = [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
        if not texts:
            raise ValueError(f"The `enum` of the string {key!r} must be an array that contains strings.")
        return texts
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(part.get(keyword), list):
            known = [texts_of(option, schema, key, depth + 1) for option in part[keyword]]
            if keyword == "allOf":
                return next((option for option in known if option is not None), None)
            return [text for option in known for text in option or ()] if None not in known else None
    return None


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemas of a function's arguments."""
    shapes = [shape.get("properties") for shape in shapes_of(schema) if isinstance(shape, Mapping)]
    return {key: part for shape in reversed(shapes) if isinstance(shape, Mapping) for key, part in shape.items()}


def additional_properties_of(schema: Mapping[str, Any]) -> Any:
    """The schema of arguments that have no schema of their own; None if there is none."""
    shapes = [shape for shape in shapes_of(schema) if isinstance(shape, Mapping)]
    return next((shape["additionalProperties"] for shape in shapes if "additionalProperties" in shape), None)


def shapes_of(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas of the objects that the arguments may be: one, or several alternatives."""
    shape = resolve_reference(schema, schema)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(shape, Mapping) and "properties" not in shape and isinstance(shape.get(keyword), list):
            return [resolve_reference(option, schema) for option in shape[keyword]]
    return [shape]


def as_json(text: str, types: Types) -> str:
    """A value that is not known to be a string, as JSON: a string if it cannot be read, or if nothing else is allowed.

    Args:
        text: JSON, a literal of Python, or the text of a string.
        types: the allowed types.
    """
    read, value = _read(text.strip(), types)
    if read and (types is None or "string" not in types or _fits(value, types)):
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except _UNREADABLE:
            pass
    return json.dumps(text, ensure_ascii=False)


def python_value(node: ast.expr) -> Any:
    """The value of a literal, which may contain JSON's constants.

    Raises:
        ValueError: it is not a literal.
    """
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [python_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {
                python_value(key): python_value(value)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
        case _:
            return ast.literal_eval(node)


def _read(text: str, types: Types) -> tuple[bool, Any]:
    """Return whether a text is a value, and that value."""
    if text in _PYTHON_CONSTANTS:
        return True, _PYTHON_CONSTANTS[text]
    if types is not None and "boolean" in types and text.lower() in ("true", "false"):
        return True, text.lower() == "true"
    try:
        return True, json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    try:
        if types is not None and "string" not in types and types & _NUMBERS and _DECIMAL.fullmatch(text):
            return True, float(text) if "." in text else int(text)
        if text[:1] not in ("{", "[", "("):
            return False, None
        return True, python_value(ast.parse(text, mode="eval").body)
    except _UNREADABLE:
        return False, None


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _fits(value: Any, types: frozenset[str]) -> bool:
    kind = _type_of(value)
    return kind in types or (kind == "integer" and "number" in types)


def _type_of(value: Any) -> str:
    """The JSON type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "integer" if math.isfinite(value) and value.is_integer() else "number"
        case list():
            return "array"
        case _:
            return "object"
