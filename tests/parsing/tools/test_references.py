"""Tools whose parameters refer to definitions: calls are held to the schema in every format."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from random import Random
from typing import Any, Literal

import jsonschema
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel

from quire.engine.client.grammar import GrammarTokens
from quire.parsing.structured.compilation import complete_grammar
from quire.parsing.structured.constraint import grammar_of
from quire.parsing.tools.calls import join_calls
from quire.parsing.tools.choice import ToolPlan
from quire.parsing.tools.registry import FORMATS
from quire.protocol.errors import InvalidRequest
from tests.support.formats import CONSTRAINED
from tests.support.server import running_server
from tests.support.tokenizer import EOS, VOCAB_SIZE, byte_tokenizer, write_tokenizer


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Leaf(BaseModel):
    kind: Literal["leaf"]
    color: Color
    more: Color | None


class Branch(BaseModel):
    kind: Literal["branch"]
    children: list[Branch | Leaf]


class Plant(BaseModel):
    """Nested models, enums and a union, one of them recursive."""

    name: Color
    root: Branch
    size: int | Literal["huge"]
    leaves: list[Leaf]


class Chain(BaseModel):
    """Refer to itself at the root."""

    value: bool
    next: Chain | None


def parameters_of(model: type[BaseModel]) -> dict[str, Any]:
    schema = pydantic_function_tool(model)["function"]["parameters"]
    return dict(schema)


CLOSED = {"additionalProperties": False}
SCHEMAS: dict[str, dict[str, Any]] = {
    "plant": parameters_of(Plant),
    "chain": parameters_of(Chain),
    "chain_as_pydantic_writes_it": Chain.model_json_schema(),
    "root": {"type": "object", "properties": {"n": {"enum": [1, 2]}, "c": {"type": "array", "items": {"$ref": "#"}}},
             "required": ["n"], **CLOSED},
    "pointers": {"type": "object", "properties": {"a/b": {"enum": ["x"]}, "c": {"$ref": "#/properties/a~1b"},
                                                  "d": {"allOf": [{"$ref": "#/%24defs/x%20y"}]}},
                 "required": ["a/b", "c", "d"], "$defs": {"x y": {"enum": [True]}}, **CLOSED},
    "named": {"$id": "https://example.com/schema", "type": "object", "required": ["a", "b", "c"],
              "properties": {"a": {"$ref": "#place"}, "b": {"$ref": "schema#/$defs/one"}, "c": {"$ref": "inner"}},
              "$defs": {"one": {"$anchor": "place", "enum": [1]},
                        "two": {"$id": "inner", "$ref": "#/$defs/three", "$defs": {"three": {"enum": [3]}}}}, **CLOSED},
    "draft": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object",
              "properties": {"a": {"$ref": "#/definitions/a"}}, "required": ["a"],
              "definitions": {"a": {"type": "array", "items": [{"enum": [1]}, {"enum": [2]}], "minItems": 2,
                                    "additionalItems": False}}, **CLOSED},
    "tuple": {"type": "object", "properties": {"a": {"type": "array", "prefixItems": [{"enum": [1]}, {"enum": [2]}],
                                                     "minItems": 2, "items": False}}, "required": ["a"], **CLOSED},
    "names": {"type": "object", "properties": {"$ref": {"enum": ["#/a"]}, "v": {"const": {"$ref": "#/b"}}},
              "required": ["$ref", "v"], **CLOSED},
}  # fmt: skip


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> GrammarTokens:
    folder = tmp_path_factory.mktemp("tokens")
    write_tokenizer(folder)
    return GrammarTokens(folder, VOCAB_SIZE, (EOS,))


def plan_of(name: str, schemas: dict[str, dict[str, Any]], **fields: Any) -> ToolPlan:
    return ToolPlan(format=FORMATS[name].constrained, schemas=schemas, **fields)


def text_of(tokens: GrammarTokens, plan: ToolPlan, rng: Random) -> str:
    """A random text that the grammar allows; values tend to end soon."""
    matcher = tokens.matcher(complete_grammar(grammar_of(None, tokens.special, plan=plan)))
    depths: list[int] = []
    soon = set(byte_tokenizer().encode('"]}<').ids)
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(VOCAB_SIZE) if mask[token // 8] >> token % 8 & 1]
        ending = [token for token in allowed if token in soon or token == EOS]
        token = rng.choice(ending if ending and rng.random() < 0.7 else allowed)
        if token == EOS:
            break
        assert matcher.consume_token(token), matcher.get_error()
        depths.append(token)
        assert len(depths) < 3000
    return byte_tokenizer().decode(depths, skip_special_tokens=False)


@pytest.mark.parametrize("name", CONSTRAINED)
def test_calls_match_schemas_with_references(tokens: GrammarTokens, name: str) -> None:
    """One tool alone, as when it is named, and all of them, whose definitions must not be mistaken for each other."""
    for schemas in ({"plant": SCHEMAS["plant"]}, {"draft": SCHEMAS["draft"]}, SCHEMAS):
        plan = plan_of(name, schemas, required=True, parallel=False)
        for seed in range(1 if len(schemas) == 1 else 4):
            text = text_of(tokens, plan, Random(seed))
            (call,) = join_calls(plan.format.parser(schemas).push(text, last=True).calls)
            jsonschema.validate(json.loads(call.arguments), schemas[call.name or ""])


@pytest.mark.parametrize("name", CONSTRAINED)
def test_strict_tools_may_refer_to_definitions(tokens: GrammarTokens, name: str) -> None:
    plan = plan_of(name, SCHEMAS, strict=frozenset(["plant", "root"]))
    tokens.matcher(complete_grammar(grammar_of(None, tokens.special, plan=plan)))


@pytest.mark.parametrize("name", CONSTRAINED)
@pytest.mark.parametrize(
    "reference", ["#/$defs/Missing", "#missing", "https://example.com/a.json#/b", "Missing", "#/required/0"]
)
def test_a_reference_that_leads_nowhere_is_named(name: str, reference: str) -> None:
    schema = {"type": "object", "properties": {"a": {"items": {"$ref": reference}}}, "required": ["a"], "$defs": {}}
    plan = plan_of(name, {"find": schema}, required=True)
    with pytest.raises(InvalidRequest) as raised:
        grammar_of(None, {}, plan=plan)
    assert "'find'" in raised.value.message
    assert reference in raised.value.message
    assert raised.value.param == "tools"


LOOPS: list[dict[str, Any]] = [
    {"$ref": "#"},
    {"properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]},
    {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/$defs/b"}}},
]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "kimi_k2"])
async def test_references_that_only_lead_to_each_other_are_refused(tmp_path: Path, name: str) -> None:
    async with running_server(tmp_path, tool_call_parser=name) as server:
        for schema in LOOPS:
            tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
            body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "max_tokens": 5}
            answer = await server.post("/v1/chat/completions", {**body, "tool_choice": "required"})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == "tools"
            assert (await server.post("/v1/chat/completions", body)).status_code == 200
