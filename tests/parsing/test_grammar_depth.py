"""The depth of grammars and schemas, without recursion and in linear time."""

from __future__ import annotations

from typing import Any

import pytest

from quire.parsing.grammar_depth import json_levels, rules_depth, schema_depth


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ("", 0),
        ('start: "a"', 1),
        ('start: a b\na: "x"\nb: a "start" /b/ // start\n', 3),
        ('start: a\na[lazy]: B\nB.2: "c"\n', 3),
        ('start: a\na: "(" a ")" | "x"\n', 2),
        ('root ::= one-two\none-two ::= [root"] "one-two" three\nthree ::= "x" # root', 3),
        ("start: %json {\n}\n", 1),
    ],
)
def test_rules(text: str, depth: int) -> None:
    assert rules_depth(text) == depth


@pytest.mark.parametrize(
    ("schema", "depth"),
    [
        (None, 0),
        (True, 0),
        ({"type": "object"}, 1),
        ({"properties": {"a": {"type": "null"}}}, 3),
        ({"anyOf": [{}, {"items": {}}]}, 4),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {}}}, 4),
        ({"$ref": "#"}, 1),
        ({"$defs": {"a~b/": {"items": {}}}, "items": {"$ref": "#/$defs/a~0b~1"}}, 4),
        ({"$ref": "#/missing/x", "items": {"$ref": "https://example.com"}}, 2),
    ],
)
def test_schemas(schema: Any, depth: int) -> None:
    assert schema_depth(schema) == depth


def test_long_chains() -> None:
    count = 5_000
    rules = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(count))
    assert rules_depth(rules) == count + 1
    references = {f"d{i}": {"$ref": f"#/d{i + 1}"} for i in range(count)} | {f"d{count}": {}}
    assert schema_depth(references) == count + 2


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("schema", "levels"),
    [
        ({"type": "string"}, 0),
        ({"type": "object", "properties": {"a": {"type": "string"}}}, 1),
        ({"type": "object"}, 4),
        (True, 0),
        ({"type": "array", "items": {"type": "object", "properties": {"a": {"enum": [[1]]}}}}, 2),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"b": {"type": "array", "items": {"const": 1}}}}}}, 2),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/a"}}}}}, 1),
        (nested(300), 8),
    ],
)
def test_levels_of_indentation(schema: Any, levels: int) -> None:
    assert json_levels(schema) == levels
