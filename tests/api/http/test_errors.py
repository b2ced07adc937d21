"""Error responses name the field and say what was wrong."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError

from quire.api.http import error_handlers
from quire.engine.client.errors import EngineDead, RequestFailed, RequestRefused
from quire.protocol.errors import as_api_error
from quire.rendering.renderer import Renderer
from tests.support.server import running_server

COMPLETIONS = "/v1/completions"


async def test_pages_that_do_not_exist(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.http.get("/nowhere")
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NotFoundError")
        answer = await server.http.get(COMPLETIONS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, 405)
        answer = await server.http.post(COMPLETIONS, content=b"{}", headers={"content-type": "text/plain"})
        assert answer.status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "complaint"),
    [
        (COMPLETIONS, "[]", "body: Input should be an object"),
        (COMPLETIONS, '{"prompt": "x", "stream_options": 1}', "stream_options: Input should be an object"),
        (COMPLETIONS, '{"prompt": "x", "logit_bias": []}', "logit_bias: Input should be an object"),
    ],
)
async def test_an_object_is_called_so(tmp_path: Path, path: str, body: str, complaint: str) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.http.post(path, content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, complaint)


async def test_what_can_be_got_has_a_head(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        for path in ("/", "/v1/models", "/v1/models/fake", "/metrics", "/version", "/openapi.json"):
            head, whole = await server.http.head(path), await server.http.get(path)
            assert (head.status_code, head.content) == (200, b""), path
            assert head.headers["content-type"] == whole.headers["content-type"]
        assert head.headers["content-length"] == whole.headers["content-length"]
        assert (await server.http.head("/v1/models/nope")).status_code == 404
        assert (await server.http.head("/nowhere")).status_code == 404
        assert 'handler="/v1/models",method="HEAD"' in (await server.http.get("/metrics")).text


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/", "GET, HEAD, POST"),
        ("/v1/models", "GET, HEAD"),
        (COMPLETIONS, "POST"),
        ("/v1/files/a", "DELETE, GET, HEAD"),
    ],
)
async def test_a_refused_method_names_all_others(tmp_path: Path, path: str, methods: str) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.http.put(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, methods)


async def test_errors_of_responses_have_openais_types(tmp_path: Path) -> None:
    async with running_server(tmp_path, capacity=1) as server:
        body = {"input": "hi"}
        for answer, status in (
            (await server.post("/v1/responses", {"input": 5}), 400),
            (await server.post("/v1/responses", {**body, "model": "none"}), 404),
            (await server.http.get("/v1/responses/resp_none"), 404),
        ):
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
        with server.state.models[0].client.slots(1):
            answer = await server.post("/v1/responses", body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")


CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (COMPLETIONS, {"prompt": 5}, "prompt", "prompt: Input should be a valid string or a valid list"),
        (COMPLETIONS, {}, "prompt", "prompt: Field required"),
        (COMPLETIONS, {"prompt": "x", "stop": [1]}, "stop[0]", "stop[0]: Input should be a valid string"),
        (
            CHAT,
            {"messages": [{**USER, "content": 5}]},
            "messages[0].content",
            "messages[0].content: Input should be a ",
        ),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role: Field required"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens: `max_tokens` must be at least 1"),
        (COMPLETIONS, {"prompt": "x", "stream_options": {}}, "stream_options", "stream_options: Stream options can"),
        (COMPLETIONS, {"prompt": "x", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "prompt_logprobs: "),
        (CHAT, {"messages": [USER], "top_logprobs": 2}, "top_logprobs", "top_logprobs: when using"),
        (
            CHAT,
            {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
            "add_generation_prompt: Cannot set both",
        ),
        (
            COMPLETIONS,
            {"prompt": "x", "structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "structured_outputs.whitespace_pattern: `whitespace_pattern` can only be used with",
        ),
        (
            COMPLETIONS,
            {"prompt": "x", "guided_regex": "a", "guided_whitespace_pattern": " "},
            "guided_whitespace_pattern",
            "guided_whitespace_pattern: `guided_whitespace_pattern` can only be used with",
        ),
        ("/tokenize", {}, "prompt", "prompt: Exactly one of"),
        (COMPLETIONS, [], None, "body: Input should be"),
        (
            COMPLETIONS,
            {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(1000)), "a")},
            "logit_bias.0",
            "logit_bias.0: Input should be a valid number",
        ),
    ],
)
async def test_the_field_at_fault_is_named(
    tmp_path: Path, path: str, body: Any, param: str | None, message: str
) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post(path, body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert error["message"].startswith(message)
        assert "Value error" not in error["message"]
        assert error["message"].count(";") <= 10


async def test_broken_json_blames_no_field(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        headers = {"content-type": "application/json"}
        answer = await server.http.post(COMPLETIONS, content=b'{"prompt": "x", "max_tokens":}', headers=headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, None)
        assert error["message"].startswith("body: JSON decode error: ")


async def test_what_is_too_much_for_the_whole_server_is_named(tmp_path: Path) -> None:
    async with running_server(tmp_path, capacity=3) as server:
        for body, param in (({"prompt": ["x"] * 4}, "prompt"), ({"prompt": "x", "n": 4}, "n")):
            answer = await server.post(COMPLETIONS, body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        answer = await server.post(CHAT, {"messages": [USER], "n": 4})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


async def test_our_own_mistakes_do_not_end_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("our mistake")

    async with running_server(tmp_path) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        monkeypatch.setattr(Renderer, "text", broken)
        with caplog.at_level(logging.ERROR):
            status, body = await raw_post(reader, writer)
        assert (status, json.loads(body)["error"]["code"]) == (500, 500)
        assert "our mistake" in caplog.text
        assert "our mistake" not in body
        monkeypatch.undo()
        assert (await raw_post(reader, writer))[0] == 200
        writer.close()


async def raw_post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, str]:
    """Status and body of a completion over a connection that is kept."""
    body = b'{"prompt": "x"}'
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    )
    writer.write(head.encode() + b"\r\n\r\n" + body)
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    (length,) = [int(line.partition(":")[2]) for line in lines if line.startswith("content-length")]
    return int(lines[0].split()[1]), (await reader.readexactly(length)).decode()


def test_refused_requests_are_client_errors_and_engine_failures_are_not() -> None:
    assert as_api_error(RequestRefused("too long")).status == 400
    assert as_api_error(RequestFailed("sampling failed")).status == 500
    assert as_api_error(EngineDead("gone")).status == 503


LONG = "long " * 200_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x", "model": LONG}),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {LONG: 1}}),
        (COMPLETIONS, {"prompt": "x", "response_format": {"type": LONG}}),
        (COMPLETIONS, {"prompt": "x", "structured_outputs": {"choice": ["a"], LONG: 1}}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
        (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": LONG}),
        (CHAT, {"messages": [USER], "chat_template_kwargs": {LONG: 1}}),
        ("/v1/responses", {"input": [{"type": LONG}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": LONG}]}]}),
        ("/v1/responses", {"input": "x", "previous_response_id": LONG}),
        ("/v1/responses", {"input": "x", "tools": [{"type": "mcp", "server_label": LONG}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": LONG}]}], "max_tokens": 1}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 1, "model": LONG}),
        ("/v1/embeddings", {"input": "x", "prompt_name": LONG}),
        ("/v1/embeddings", {"input": "x", "encoding_format": LONG}),
        ("/pooling", {"input": "x", "task": LONG[:1000]}),
        ("/v2/embed", {"inputs": [{"content": [{"type": LONG, LONG: 1}]}]}),
        ("/rerank", {"query": "x", "documents": ["x", {"text": {LONG: 1}}]}),
        ("/score", {"text_1": "x", LONG: "x"}),
    ],
)
async def test_errors_repeat_little_of_a_request(tmp_path: Path, path: str, body: Any) -> None:
    async with running_server(tmp_path, strict_fields=True) as server:
        answer = await server.post(path, body)
        assert 400 <= answer.status_code < 500, answer.text
        assert len(answer.content) < 6000
        assert len(str(answer.headers)) < 6000


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "x", "metadata": {str(i): 1 for i in range(100_000)}}),
        (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": "a", **{str(i): 1 for i in range(100_000)}}}),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {str(i): "a" for i in range(100_000)}}),
        (COMPLETIONS, {"prompt": [[]] * 100_000}),
        (COMPLETIONS, {"prompt": "x", **{f"unknown{i}": 1 for i in range(100_000)}}),
        (COMPLETIONS, {"prompt": "x", "stream": True, "stream_options": {str(i): 1 for i in range(100_000)}}),
        (CHAT, {"messages": [USER], "chat_template_kwargs": {str(i): 1 for i in range(100_000)}}),
        ("/v2/embed", {"texts": ["x"], "embedding_types": ["x"] * 100_000}),
        ("/v2/embed", {"inputs": [{}] * 100_000}),
        ("/rerank", {"query": "x", "documents": [{}] * 100_000}),
        ("/score", {"text_1": "x", "text_2": [5] * 100_000}),
        ("/v1/embeddings", {"input": [[-1]] * 100_000}),
        ("/predict", {"inputs": [["x", 5]] * 100_000}),
        (CHAT, {"messages": [USER] * 10_000}),
        (CHAT, {"messages": [{"role": "user", "content": ["x"] * 5000}] * 20}),
        ("/v1/messages", {"messages": [USER] * 10_000, "max_tokens": 1}),
        ("/tokenize", {"messages": [USER] * 10_000}),
    ],
)
async def test_a_hundred_thousand_entries_are_one_error(tmp_path: Path, path: str, fields: dict[str, Any]) -> None:
    """Pydantic makes an error for each of them if nothing bounds their number first."""
    async with running_server(tmp_path) as server:
        problems = 0

        def counted(error: RequestValidationError) -> Any:
            nonlocal problems
            problems += len(error.errors())
            return validation_error(error)

        validation_error = error_handlers._validation_error
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(error_handlers, "_validation_error", counted)
            answer = await server.post(path, fields)
        assert answer.status_code == 400
        assert problems <= 5
        assert len(answer.content) < 1000
