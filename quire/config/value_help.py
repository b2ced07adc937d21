"""Describes the accepted values of settings, for error messages and the documentation."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

_LONG_POWER = 20  # larger powers of two are written as powers
_KINDS = {"string": "a string", "boolean": "true or false", "object": "a JSON object"}


def describe(field: FieldInfo) -> str:
    """The accepted values of a field, e.g. `an integer from 1 to 256`."""
    annotated: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return _describe_schema(TypeAdapter[Any](annotated).json_schema())


def size_text(nbytes: int) -> str:
    """A size as it can be written in a setting, e.g. `32KiB`."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{unit}"
    return str(nbytes)


def _describe_schema(schema: dict[str, Any]) -> str:
    if "accepts" in schema:
        return str(schema["accepts"])
    if "anyOf" in schema:
        return " or ".join(_describe_schema(part) for part in schema["anyOf"] if part.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return _choice([str(value) for value in schema.get("enum", [schema.get("const")])])
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return ("an integer" if kind == "integer" else "a number") + _bounds(schema)
    if kind == "array":
        return "one or more strings"
    if schema.get("format") == "path":
        return "a path"
    return _KINDS.get(str(kind), "a value")


def _choice(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _minus_one(bound: int) -> str:
    """The largest integer below a bound, as a power of two minus 1 if that is shorter."""
    power = bound.bit_length() - 1
    return f"2^{power}-1" if power > _LONG_POWER and bound == 1 << power else str(bound - 1)


def _bounds(schema: dict[str, Any]) -> str:
    low = schema.get("minimum")
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    above = schema.get("exclusiveMinimum")
    if low is not None and high is not None:
        if schema.get("type") == "integer" and "maximum" not in schema:
            return f" from {low} to {_minus_one(high)}"
        return f" from {low} to {high}" if "maximum" in schema else f" from {low} below {high}"
    if above is not None:
        return f" above {above}" + (f", at most {high}" if high is not None else "")
    return f" of at least {low}" if low is not None else ""
