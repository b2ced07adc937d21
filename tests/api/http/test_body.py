"""Request bodies: only valid JSON is accepted, and large or hostile ones do not block other requests."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from quire.api.http import body
from quire.protocol import strict_json
from quire.protocol.strict_json import MAX_DEPTH
from tests.support.server import running_server

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": ["a", 1] * 500_000}),
        (COMPLETIONS, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(200_000)), "a")}),
        (CHAT, {"messages": [5] * 500_000}),
        ("/detokenize", {"tokens": ["a"] * 500_000}),
    ],
)
async def test_a_million_mistakes_are_answered_at_once(tmp_path: Path, path: str, body: Any) -> None:
    async with running_server(tmp_path) as server:
        content = json.dumps(body)
        began = time.process_time()
        answer = await server.http.post(path, content=content, headers={"content-type": "application/json"})
        assert time.process_time() - began < 5
        assert answer.status_code == 400
        assert len(answer.text) < 2000


HALF = r'"\ud800"'


@pytest.mark.parametrize("field", ["prompt", "stop", "cache_salt", "model", "nonsense"])
async def test_half_characters_are_refused(tmp_path: Path, field: str) -> None:
    async with running_server(tmp_path) as server:
        body = f'{{"prompt": "x", "{field}": {HALF}}}'
        answer = await server.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400


async def test_only_json_is_taken(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""):
            headers = {"content-type": kind} if kind else {}
            answer = await server.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == "Unsupported Media Type: Only 'application/json' is allowed"
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        answer = await server.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
        assert answer.status_code == 200


async def test_compressed_bodies_are_refused_as_such(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        answer = await server.http.post(COMPLETIONS, content=gzip.compress(b'{"prompt": "x"}'), headers=headers)
        assert (answer.status_code, "'gzip' are not supported" in answer.text) == (400, True)
        form = {"content-type": "multipart/form-data; boundary=b", "content-encoding": "gzip"}
        answer = await server.http.post("/v1/files", content=gzip.compress(b"x"), headers=form)
        assert (answer.status_code, "'gzip' are not supported" in answer.text) == (400, True)
        headers["content-encoding"] = "identity"
        assert (await server.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)).status_code == 200


USER = '"messages": [{"role": "user", "content": "x"}]'
ARGUMENTS = '"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]}]'
FUNCTION = '{"type": "function", "function": {"name": "f", "parameters": DEEP}}'
TOOL_USE = '{"type": "tool_use", "id": "a", "name": "f", "input": DEEP}'
NESTED = [  # bodies, and the field that DEEP is in
    (COMPLETIONS, '{"prompt": "x", "nonsense": DEEP}', "nonsense"),
    (COMPLETIONS, '{"prompt": "x", "kv_transfer_params": DEEP}', "kv_transfer_params"),
    (COMPLETIONS, '{"prompt": "x", "guided_json": DEEP}', "guided_json"),
    (
        COMPLETIONS,
        '{"prompt": "x", "structured_outputs": {"json": DEEP, "disable_additional_properties": true}}',
        "structured_outputs",
    ),
    (CHAT, f'{{{USER}, "response_format": {{"type": "json_schema", "json_schema": {{"schema": DEEP}}}}}}',
     "response_format"),
    (CHAT, f'{{{USER}, "response_format": {{"type": "structural_tag", "format": DEEP}}}}', "response_format"),
    (CHAT, f'{{{USER}, "tools": [{FUNCTION}], "tool_choice": "required"}}', "tools"),
    (CHAT, f'{{{USER}, "tools": [{FUNCTION}]}}', "tools"),
    (CHAT, f"{{{ARGUMENTS}}}", "messages"),
    (CHAT, f'{{{USER}, "chat_template_kwargs": {{"a": DEEP}}}}', "chat_template_kwargs"),
    (CHAT, f'{{{USER}, "documents": [{{"a": DEEP}}]}}', "documents"),
    ("/v1/chat/completions/render", f'{{{USER}, "tools": [{FUNCTION}], "tool_choice": "required"}}', "tools"),
    (RESPONSES, '{"input": "x", "text": {"format": {"type": "json_schema", "schema": DEEP}}}', "text"),
    (RESPONSES, '{"input": "x", "tools": [{"type": "function", "name": "f", "parameters": DEEP}]}', "tools"),
    (RESPONSES, '{"input": [{"role": "user", "content": "x", "nonsense": DEEP}]}', "input"),
    (RESPONSES, '{"input": "x", "reasoning": {"nonsense": DEEP}}', "reasoning"),
    (MESSAGES, f'{{"max_tokens": 5, "messages": [{{"role": "assistant", "content": [{TOOL_USE}]}}]}}', None),
    (MESSAGES, f'{{"max_tokens": 5, {USER}, "tools": [{{"name": "f", "input_schema": DEEP}}]}}', None),
    (
        MESSAGES,
        f'{{"max_tokens": 5, {USER}, "output_config": {{"format": {{"type": "json_schema", "schema": DEEP}}}}}}',
        None,
    ),
    ("/v1/messages/count_tokens", f'{{"messages": [{{"role": "assistant", "content": [{TOOL_USE}]}}]}}', None),
    ("/tokenize", f"{{{ARGUMENTS}}}", "messages"),
    ("/inference/v1/generate", '{"token_ids": [5], "sampling_params": {"structured_outputs": {"json": DEEP}}}',
     "sampling_params"),
]  # fmt: skip
JSON = {"content-type": "application/json"}


def nested(depth: int) -> str:
    """A JSON schema with so many levels."""
    return '{"items":' * depth + "true" + "}" * depth


async def test_deeper_nesting_than_can_be_serialized_is_refused(tmp_path: Path) -> None:
    async with running_server(tmp_path, tool_call_parser="hermes") as server:
        for (path, body, field), depth in itertools.product(NESTED, (MAX_DEPTH, 260, 1000, 3000)):
            answer = await server.http.post(path, content=body.replace("DEEP", nested(depth)), headers=JSON)
            assert answer.status_code == 400, (body, answer.text)
            error = answer.json()["error"]
            assert f"at most {MAX_DEPTH} levels" in error["message"], body
            if depth < 1000:  # the field is not known if the body cannot be parsed
                assert error.get("param") == field


async def test_nesting_up_to_the_limit_is_not_an_error_of_the_server(tmp_path: Path) -> None:
    async with running_server(tmp_path, tool_call_parser="hermes") as server:
        for (path, body, _), depth in itertools.product(NESTED, (20, MAX_DEPTH - 10)):
            answer = await server.http.post(path, content=body.replace("DEEP", nested(depth)), headers=JSON)
            assert answer.status_code in (200, 400), (body, answer.text)
            assert "levels deep" not in answer.text


async def test_nesting_in_strings_and_in_many_places_is_not_deep(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        body = {"prompt": '[{"' * 300, "nonsense": [{"a": [1]}] * 1000}
        assert (await server.post(COMPLETIONS, body)).status_code == 400  # too long for the context
        body["prompt"] = '[{"' * 100
        assert (await server.post(COMPLETIONS, body)).status_code == 200


async def test_deep_arguments_in_text_are_not_an_error_of_the_server(tmp_path: Path) -> None:
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    async with running_server(tmp_path, chat_template=template) as server:
        for depth in (100, 260, 600, 1000, 3000, 20_000):
            function = {"name": "f", "arguments": nested(depth)}
            for path, body in (
                (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": function}]}]}),
                (RESPONSES, {"input": [{"type": "function_call", "call_id": "a", **function}]}),
            ):
                assert (await server.post(path, body)).status_code == 400


async def test_others_run_between_the_passes_over_a_large_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0
    seen: list[int] = []
    check = strict_json.check_depth

    def check_depth(value: Any) -> None:
        seen.append(turns)
        check(value)

    def load(content: bytes | str) -> Any:
        seen.append(turns)
        return json.loads(content)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(body, "check_depth", check_depth)
    monkeypatch.setattr(body, "load_strictly", load)
    async with running_server(tmp_path) as server:
        running = asyncio.create_task(others())
        answer = await server.http.post("/v1/embeddings", json={"input": [[1] * 400] * 2000})
        running.cancel()
    assert answer.status_code == 400, "the fake model has no task for it"
    assert len(seen) == 2
    assert seen[0] < seen[1]
