"""Fields that constrain an answer with a grammar, and requests that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.engine.wire.protocol import AddRequest
from tests.support.fake_core import FakeCore
from tests.support.server import running_server

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


def grammars(core: FakeCore) -> list[dict[str, Any]]:
    added = [message.params for message in core.received if isinstance(message, AddRequest)]
    return [json.loads(params.grammar) if params.grammar else {} for params in added]


@pytest.mark.parametrize(
    ("fields", "held"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, SCHEMA),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, SCHEMA),
        ({"structured_outputs": {"json_object": True}}, {"type": "object"}),
        ({"guided_json": SCHEMA}, SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, SCHEMA),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            {**SCHEMA, "x-guidance": {"whitespace_flexible": False}},
        ),
        (
            {"structured_outputs": {"json": {"properties": {"a": {}}}, "disable_additional_properties": True}},
            {"properties": {"a": {}}, "additionalProperties": False},
        ),
    ],
)
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
async def test_json_by_any_of_its_fields(tmp_path: Path, route: str, fields: Any, held: Any) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        body = ASK if "chat" in route else {"prompt": "hi", "max_tokens": 5}
        answer = await server.post(route, {**body, **fields})
    assert answer.status_code == 200, answer.text
    (grammar,) = grammars(core)
    (schema,) = [part["json_schema"] for part in grammar["grammars"] if "json_schema" in part]
    if "x-guidance" not in held:
        assert "whitespace_pattern" in schema.pop("x-guidance")
    assert schema == held


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "what"}}}, "structural_tag"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "5"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "nothing of the kind"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "unheard_of": 1}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "structured_outputs"),
        ({"guided_regex": "(" * 500}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
async def test_what_cannot_be_had_is_refused_by_name(tmp_path: Path, fields: Any, param: str) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        answer = await server.post("/v1/chat/completions", {**ASK, **fields})
        assert answer.status_code == 400, answer.text
        assert (answer.json()["error"]["param"] or "").startswith(param), answer.text
        assert (await server.post("/v1/chat/completions", ASK)).status_code == 200
    assert grammars(core) == [{}]


async def test_text_asks_for_nothing(tmp_path: Path) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        await server.post("/v1/chat/completions", {**ASK, "response_format": {"type": "text"}})
    assert grammars(core) == [{}]


async def test_the_form_begins_behind_the_reasoning(tmp_path: Path) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        await server.post("/v1/chat/completions", {**ASK, "guided_choice": ["a"]})
        await server.post("/v1/completions", {"prompt": "hi", "guided_choice": ["a"]})
    chat, completion = (grammar["grammars"][0]["lark_grammar"] for grammar in grammars(core))
    assert "? r" in chat.splitlines()[0]
    assert completion.splitlines()[0] == "start: r0"
