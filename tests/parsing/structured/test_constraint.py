"""Fields that constrain an answer with a grammar, and requests that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.engine.client.protocol import AddRequest
from tests.support.fake_core import FakeCore
from tests.support.server import running_server

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


def grammars(core: FakeCore) -> list[dict[str, Any]]:
    added = [message.sampling_params for message in core.received if isinstance(message, AddRequest)]
    return [json.loads(params.grammar) if params.grammar else {} for params in added]


@pytest.mark.parametrize(
    ("fields", "held"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, SCHEMA),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, SCHEMA),
        ({"response_format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}, SCHEMA),
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
        ({"response_format": {"type": "structural_tag", "format": {"type": "what"}}}, "response_format"),
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


DEEP = '{"items":' * 300 + "{}" + "}" * 300
GBNF = {
    "a rule that does not exist": 'root ::= "a" missing',
    "no root": 'item ::= "a"',
    "a backslash at the end": 'root ::= "a\\',
    "a backslash at the end of a class": "root ::= [a\\",
    "a rule with the name that root gets": 'root ::= start\nstart ::= "a"',
    "names that differ in a dash only": 'root ::= a-b a_b\na-b ::= "x"\na_b ::= "y"',
    "names that differ in case only": 'root ::= ab AB\nab ::= "x"\nAB ::= "y"',
    "too many groups": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000,
    "a count that is no number": 'root ::= "a"{²}',
    "a huge count": 'root ::= "a"{' + "9" * 5000 + "}",
    "nothing but space": " \n",
    "nothing but a comment": "# nothing",
}
TREES: list[Any] = [
    None, True, 5, "sequence", [], {}, {"type": ["sequence"]}, {"type": "sequence"},
    {"type": "sequence", "elements": 5},
    {"type": "sequence", "elements": "ab"}, {"type": "sequence", "elements": {"a": 1}}, {"type": "or", "elements": []},
    {"type": "or", "elements": [5]}, {"type": "const_string", "value": 5}, {"type": "regex", "pattern": None},
    {"type": "regex", "pattern": "("}, {"type": "grammar", "grammar": "root ::= missing"},
    {"type": "json_schema", "json_schema": 5}, {"type": "json_schema", "json_schema": None},
    {"type": "tag", "begin": "a", "content": 5, "end": "b"}, {"type": "tag", "begin": "a", "end": "b"},
    {"type": "tag", "begin": 1, "content": {"type": "any_text"}, "end": "b"},
    {"type": "triggered_tags", "triggers": 5, "tags": []}, {"type": "triggered_tags", "triggers": [5], "tags": []},
    {"type": "triggered_tags", "triggers": ["a"], "tags": [5]}, {"type": "triggered_tags", "triggers": [], "tags": []},
    {"type": "triggered_tags", "triggers": [""],
     "tags": [{"begin": "a", "content": {"type": "any_text"}, "end": "b"}]},
    {"type": "tags_with_separator", "tags": 5, "separator": ","},
    {"type": "tags_with_separator", "tags": ["a"], "separator": ","},
    {"type": "tags_with_separator", "tags": [{"begin": "a", "content": {"type": "any_text"}, "end": "b"}],
     "separator": 5},
]  # fmt: skip


async def test_a_wrong_gbnf_grammar_is_refused(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        for what, grammar in GBNF.items():
            for field, value in (("structured_outputs", {"grammar": grammar}), ("guided_grammar", grammar)):
                answer = await server.post("/v1/chat/completions", {**ASK, field: value})
                assert answer.status_code == 400, (what, answer.text)
                assert answer.json()["error"]["param"] == field


async def test_a_wrong_structural_tag_is_refused(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        for tree in TREES:
            whole = {"type": "structural_tag", "format": tree}
            for field, value in (
                ("response_format", whole),
                ("structural_tag", json.dumps(whole)),
                ("structured_outputs", {"structural_tag": json.dumps(whole)}),
            ):
                answer = await server.post("/v1/chat/completions", {**ASK, field: value})
                assert answer.status_code == 400, (tree, answer.text)
                assert answer.json()["error"]["param"].startswith(field), answer.text


async def test_text_that_is_no_schema_or_structural_tag_is_refused(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        for value in ("true", "false", "null", "5", '"text"', "[]", "{", "", "NaN", DEEP, "[" * 5000):
            fields: list[tuple[str, Any]] = [
                ("structural_tag", value), ("structured_outputs", {"structural_tag": value}), ("guided_json", value),
                ("structured_outputs", {"json": value, "disable_additional_properties": True}),
            ]  # fmt: skip
            for field, content in fields[: 2 if value == "true" else None]:  # as a schema, `true` allows any JSON
                answer = await server.post("/v1/completions", {"prompt": "x", field: content})
                assert answer.status_code == 400, answer.text
                assert answer.json()["error"]["param"].startswith(field), answer.text


async def test_an_error_in_a_schema_names_the_field_of_its_api(tmp_path: Path) -> None:
    wrong = {"type": "object", "properties": 5}
    tool = {"type": "function", "name": "f", "parameters": wrong}
    async with running_server(tmp_path, tool_call_parser="hermes") as server:
        for fields, field in (
            ({"text": {"format": {"type": "json_schema", "schema": wrong}}}, "text.format"),
            ({"structured_outputs": {"json": wrong}}, "structured_outputs"),
            ({"tools": [tool], "tool_choice": "required"}, "tools"),
            ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ):
            answer = await server.post("/v1/responses", {"input": "hi", **fields})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == field, answer.text


async def test_only_schemas_are_closed_to_additional_properties(tmp_path: Path) -> None:
    core, schema = FakeCore(), {
        "properties": {"properties": {"const": {"properties": {"a": 1}}}, "b": {"enum": [{"properties": {}}]}},
    }  # fmt: skip
    async with running_server(tmp_path, core) as server:
        fields = {"json": schema, "disable_additional_properties": True, "disable_any_whitespace": True}
        answer = await server.post("/v1/chat/completions", {**ASK, "structured_outputs": fields})
        assert answer.status_code == 200, answer.text
    (grammar,) = grammars(core)
    (held,) = [part["json_schema"] for part in grammar["grammars"] if "json_schema" in part]
    assert held == {**schema, "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}


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


async def test_the_number_of_tags_has_a_limit(tmp_path: Path) -> None:
    def body(structures: int, triggers: int) -> dict[str, Any]:
        tags = [{"begin": f"<t{number}>", "schema": {}, "end": "</t>"} for number in range(structures)]
        names = ["<t", *(f"<u{number}" for number in range(1, triggers))]
        return {**ASK, "response_format": {"type": "structural_tag", "structures": tags, "triggers": names}}

    async with running_server(tmp_path) as server:
        for structures, triggers, status in ((1024, 1, 200), (1025, 1, 400), (1, 1025, 400)):
            answer = await server.post("/v1/chat/completions", body(structures, triggers))
            assert answer.status_code == status, answer.text


WRAPPED = {"name": "a", "schema": SCHEMA}
NAMED = {"type": "json_schema", "json_schema": WRAPPED}
MISPLACED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": None}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "shema": SCHEMA}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {**WRAPPED, "schema": WRAPPED}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": WRAPPED, "schema": SCHEMA}}, "response_format"),
    ({"response_format": {"type": "json_object", "json_schema": WRAPPED}}, "response_format"),
    ({"response_format": {"type": "json_object", "shema": SCHEMA}}, "response_format.shema"),
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format"),
    ({"response_format": {"json_schema": WRAPPED}}, "response_format"),
    ({"structured_outputs": {"json": WRAPPED}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": json.dumps(WRAPPED)}}, "structured_outputs"),
    ({"structured_outputs": {"schema": SCHEMA}}, "structured_outputs.schema"),
    ({"guided_json": WRAPPED}, "guided_json"),
    ({"reponse_format": NAMED}, "reponse_format"),
    ({"json_schema": SCHEMA}, "json_schema"),
    ({"format": SCHEMA}, "format"),
    ({"output_config": {"format": NAMED}}, "output_config"),
    *(
        ({"structured_outputs": {"regex": "a", name: True}}, f"structured_outputs.{name}")
        for name in ("disable_any_whitespace", "disable_additional_properties")
    ),
]


@pytest.mark.parametrize(("fields", "param"), MISPLACED)
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
async def test_a_schema_in_the_wrong_place_is_refused(tmp_path: Path, route: str, fields: Any, param: str) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        answer = await server.post(route, {**(ASK if "chat" in route else {"prompt": "hi", "max_tokens": 5}), **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].removesuffix(".json_schema") == param
    assert not grammars(core)


FLAT = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("route", "fields", "place"),
    [
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "schema": None}}}, "text.format"),
        ("/v1/responses", {"text": {"format": {**FLAT, "schema": WRAPPED}}}, "text.format.schema"),
        ("/v1/responses", {"text": {"format": {"type": "text", "schema": SCHEMA}}}, "text.format"),
        ("/v1/responses", {"text": {"fromat": FLAT}}, "text.fromat"),
        ("/v1/responses", {"response_format": NAMED}, "response_format"),
        ("/v1/responses", {"guided_json": SCHEMA}, "guided_json"),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ("/v1/messages", {"output_config": {"fromat": FLAT}}, "output_config.fromat"),
        ("/v1/messages", {"output_config": {"format": FLAT}, "output_format": FLAT}, "output_format"),
        ("/v1/messages", {"output_format": {"type": "json_schema", "shema": SCHEMA}}, "output_format"),
        ("/v1/messages", {"response_format": NAMED}, "response_format"),
        ("/v1/messages", {"structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
    ],
)
async def test_the_other_apis_refuse_a_misplaced_schema(tmp_path: Path, route: str, fields: Any, place: str) -> None:
    core = FakeCore()
    asked = {"input": "hi"} if route == "/v1/responses" else {**ASK}
    async with running_server(tmp_path, core) as server:
        answer = await server.post(route, {**asked, **fields})
    assert answer.status_code == 400, answer.text
    assert place in answer.json()["error"]["message"]
    assert not grammars(core)


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("/v1/responses", {"text": {"format": {**FLAT, "name": "a"}}}),
        ("/v1/responses", {"text": {"format": NAMED}}),
        ("/v1/responses", {"text": {"format": {"type": "json_object", "schema": SCHEMA}}}),
        ("/v1/messages", {"output_config": {"format": FLAT}}),
        ("/v1/messages", {"output_format": FLAT}),
        ("/v1/messages", {"output_format": NAMED}),
    ],
)
async def test_the_other_apis_hold_answers_to_schemas(tmp_path: Path, route: str, fields: Any) -> None:
    core = FakeCore()
    asked = {"input": "hi"} if route == "/v1/responses" else {**ASK}
    async with running_server(tmp_path, core) as server:
        answer = await server.post(route, {**asked, **fields})
    assert answer.status_code == 200, answer.text
    (grammar,) = grammars(core)
    (schema,) = [part["json_schema"] for part in grammar["grammars"] if "json_schema" in part]
    assert schema["properties"] == SCHEMA["properties"]


@pytest.mark.parametrize("schema", [{}, {"title": "Any", "description": "x"}, {"$defs": {}}, True])
async def test_a_schema_that_allows_anything_is_a_schema(tmp_path: Path, schema: Any) -> None:
    async with running_server(tmp_path) as server:
        fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
        answer = await server.post("/v1/chat/completions", {**ASK, **fields})
    assert answer.status_code == 200, answer.text
