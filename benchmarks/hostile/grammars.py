"""Bodies whose answer is constrained by a grammar that is expensive, deep or not valid."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.hostile.body import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RENDER_CHAT,
    RESPONSES,
    Hostile,
    Json,
    chat,
    completion,
    function,
    message,
    nested,
    response,
    with_raw,
)

_LINKS = 3000


def bodies() -> list[Hostile]:
    """All bodies of this kind."""
    return [*_regular_expressions(), *_chains(), *_schemas(), *_deep(), *_malformed(), *_tools()]


def _structured(name: str, **constraint: Any) -> Hostile:
    return Hostile(name, CHAT, lambda: chat(structured_outputs=constraint))


def _schema(name: str, make: Any) -> Hostile:
    return Hostile(name, CHAT, lambda: chat(response_format=_format(make())))


def _format(schema: Any) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "hostile", "schema": schema}}


def _regular_expressions() -> list[Hostile]:
    words = "|".join(f"word{number:x}" for number in range(20_000))
    return [
        _structured("regex: 100,000 optional letters", regex="a?" * 100_000),
        _structured("regex: four nested repetitions", regex="(((a{100}){100}){100}){100}"),
        _structured("regex: repetition of a repetition", regex="(a{1000}){1000}"),
        _structured("regex: 20,000 words", regex=words),
        _structured("regex: exponentially many states", regex="(.*a.{24}|.*b.{24}|.*c.{24})d"),
        _structured("regex: repeated classes of Unicode", regex=r"(\p{L}{1,200}\p{N}{1,200}){1,200}"),
        _structured("regex: 50,000 nested groups", regex=nested(50_000, "(", "a", ")")),
        Hostile(
            "regex: exponentially many states, n=64",
            COMPLETIONS,
            lambda: completion(n=64, structured_outputs={"regex": "(.*a.{24}|.*b.{24})d"}),
        ),
        Hostile("regex: at the render endpoint", RENDER_CHAT, lambda: chat(guided_regex="(a{1000}){1000}")),
    ]


def _chains() -> list[Hostile]:
    def rules(arrow: str, first: str) -> str:
        links = "\n".join(f"r{number} {arrow} r{number + 1}" for number in range(_LINKS))
        return f"{first} {arrow} r0\n{links}\nr{_LINKS} {arrow} " + '"a"'

    def references(link: Any) -> Json:
        links = {f"d{number}": link({"$ref": f"#/$defs/d{number + 1}"}) for number in range(_LINKS)}
        return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{_LINKS}": {"type": "integer"}}}

    return [
        _structured("Lark: a chain of 3,000 rules", grammar=rules(":", "start")),
        _structured("GBNF: a chain of 3,000 rules", grammar=rules("::=", "root")),
        _structured("Lark: an ambiguous rule", grammar='start: start start | "a" | "b" | start "c" start'),
        _structured("Lark: 20,000 terminals", grammar=_many_terminals()),
        _schema("schema: a chain of 3,000 $ref", lambda: references(lambda reference: reference)),
        _schema("schema: a chain of 3,000 allOf", lambda: references(lambda reference: {"allOf": [reference]})),
        _schema(
            "schema: a chain of 3,000 properties",
            lambda: references(lambda reference: {"type": "object", "properties": {"a": reference}, "required": ["a"]}),
        ),
    ]


def _many_terminals() -> str:
    names = [f"T{number}" for number in range(20_000)]
    return f"start: ({' | '.join(names)})*\n" + "\n".join(f'{name}: "{name}"' for name in names)


def _schemas() -> list[Hostile]:
    def doubled(kind: str) -> Json:
        """Each definition refers twice to the next one."""
        links = {f"d{n}": {kind: [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(30)}
        return {"$ref": "#/$defs/d0", "$defs": {**links, "d30": {"type": "object"}}}

    wide = {f"property{number}": {"type": "string"} for number in range(20_000)}
    numbers = {"type": "number", "multipleOf": 1e-300, "minimum": -1e308, "maximum": 1e308}
    patterns = {"allOf": [{"type": "string", "pattern": f".*{letter}.{{30}}"} for letter in "abcdefghij"]}
    return [
        _schema("schema: anyOf doubled 30 times", lambda: doubled("anyOf")),
        _schema("schema: allOf doubled 30 times", lambda: doubled("allOf")),
        _schema("schema: oneOf doubled 30 times", lambda: doubled("oneOf")),
        _schema("schema: refers to itself", lambda: {"$ref": "#"}),
        _schema("schema: 20,000 properties, all required", lambda: _object(wide, list(wide))),
        _schema("schema: enum of 200,000 texts", lambda: {"enum": [f"value {number}" for number in range(200_000)]}),
        _schema("schema: a billion items", lambda: {"type": "array", "minItems": 10**9, "items": {"type": "null"}}),
        _schema("schema: a text of a billion letters", lambda: {"type": "string", "minLength": 10**9}),
        _schema("schema: extreme numbers", lambda: numbers),
        _schema("schema: an intersection of ten patterns", lambda: patterns),
        _schema("schema: const with a special token", lambda: {"const": "use <think> now"}),
        _structured("choice: 4,096 texts", choice=[f"text {number}" for number in range(4096)]),
        _structured("choice: 1,000 texts of 16,000 letters", choice=[f"{n}" + "x" * 16_000 for n in range(1000)]),
        Hostile("structural tags: 20,000", CHAT, lambda: chat(response_format=_tags(20_000))),
        Hostile("structural tags: triggers of 2,000 lengths", CHAT, lambda: chat(response_format=_triggers(2000))),
        Hostile(
            "schema: 20,000 properties, Responses",
            RESPONSES,
            lambda: response(
                text={"format": {"type": "json_schema", "name": "x", "schema": _object(wide, list(wide))}}
            ),
        ),
    ]


def _object(properties: Json, required: list[str]) -> Json:
    return {"type": "object", "properties": properties, "required": required}


def _tags(count: int) -> Json:
    tags = [{"begin": f"<tag{number}>", "schema": {"type": "object"}, "end": "</tag>"} for number in range(count)]
    return {"type": "structural_tag", "structures": tags, "triggers": ["<tag"]}


def _triggers(count: int) -> Json:
    return {**_tags(20_000), "triggers": ["<" + "t" * length for length in range(count)]}


def _deep() -> list[Hostile]:
    schema = nested(900, '{"properties": {"a": ', "{}", "}}")
    shallow = nested(400, '{"properties": {"a": ', "{}", "}}")
    deep_format = f'{{"type": "json_schema", "json_schema": {{"name": "x", "schema": {shallow}}}}}'
    closed = f'{{"json": {shallow}, "disable_additional_properties": true}}'
    tools = f'[{{"type": "function", "function": {{"name": "x", "parameters": {shallow}}}}}]'
    text = f'{{"format": {{"type": "json_schema", "name": "x", "schema": {shallow}}}}}'
    use = f'[{{"role": "assistant", "content": [{{"type": "tool_use", "id": "a", "name": "b", "input": {shallow}}}]}}]'
    return [
        Hostile("depth: response_format", CHAT, lambda: with_raw(chat(), response_format=deep_format)),
        Hostile("depth: closed objects", CHAT, lambda: with_raw(chat(), structured_outputs=closed)),
        Hostile("depth: schema as text", CHAT, lambda: chat(guided_json=schema)),
        Hostile("depth: required tool", CHAT, lambda: with_raw(chat(tool_choice="required"), tools=tools)),
        Hostile("depth: text.format", RESPONSES, lambda: with_raw(response(), text=text)),
        Hostile("depth: input of a tool use", MESSAGES, lambda: with_raw({"max_tokens": 8}, messages=use)),
    ]


def _malformed() -> list[Hostile]:
    return [
        _structured("GBNF: an unknown rule", grammar="root ::= nowhere"),
        _structured("GBNF: no root", grammar='other ::= "a"'),
        _structured("GBNF: ends in a backslash", grammar='root ::= "a\\'),
        _structured("GBNF: names that collide", grammar='root ::= a-b a_b\na-b ::= "x"\na_b ::= "y"'),
        _structured("structural tag: true", structural_tag="true"),
        _structured("regex: 250,000 opening brackets", regex="(" * 250_000),
        _structured("Lark: 250,000 characters of noise", grammar="start: %%% \n" * 20_000),
        Hostile("schema: 200,000 unknown keywords", CHAT, lambda: chat(response_format=_format(_unknown_keywords()))),
    ]


def _unknown_keywords() -> Json:
    return {"type": "object", **{f"keyword{number}": number for number in range(200_000)}}


def _tools() -> list[Hostile]:
    def required(name: str, *schemas: Any) -> Hostile:
        tools = [{**function(f"f{n}"), "function": {"name": f"f{n}", "parameters": s}} for n, s in enumerate(schemas)]
        return Hostile(name, CHAT, lambda: chat(tools=tools, tool_choice="required"))

    custom: Json = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "(((a{100}){100}){100}){100}"}}
    strict = [{"name": f"f{n}", "strict": True, "input_schema": {"type": "object"}} for n in range(5000)]
    return [
        required("tools: schemas that are no schemas", {"properties": {"a": True, "b": None, "c": 5}}, {"enum": 5}),
        required("tools: properties of other types", {"properties": {"a": {"enum": 5}, "b": {"enum": [1]}}}),
        required("tools: 5,000 parameters and definitions", _with_definitions(5000)),
        required("tools: 3,000 required", *[{"type": "object"}] * 3000),
        Hostile(
            "tools: custom, with an expensive regex",
            CHAT,
            lambda: chat(tools=[{"type": "custom", "custom": {"name": "x", "format": custom}}], tool_choice="required"),
        ),
        Hostile("tools: 5,000 strict ones, Anthropic", MESSAGES, lambda: message(tools=strict)),
        Hostile(
            "tools: arguments of a call that are deep",
            CHAT,
            lambda: {"messages": [{"role": "assistant", "tool_calls": [_call(nested(100_000))]}], "max_tokens": 8},
        ),
        Hostile(
            "tools: 8 MB of arguments in a call",
            CHAT,
            lambda: {"messages": [{"role": "assistant", "tool_calls": [_call(json.dumps(["x"] * 1_600_000))]}]},
        ),
    ]


def _with_definitions(count: int) -> Json:
    properties = {f"p{number}": {"$ref": "#/$defs/d1"} for number in range(count)}
    definitions = {f"d{number}": {"items": {"$ref": "#/$defs/d0"}} for number in range(count)}
    return {**_object(properties, list(properties)), "$defs": definitions}


def _call(arguments: str) -> Json:
    return {"id": "call", "type": "function", "function": {"name": "x", "arguments": arguments}}
