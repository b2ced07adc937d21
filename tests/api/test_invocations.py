"""POST /invocations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_core import FakeCore, says
from tests.support.pooling_server import pooling_server
from tests.support.server import chunks_of, running_server

PATH = "/invocations"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


async def test_the_fields_say_what_is_asked_for(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore(answer=says("hello"))) as server:
        chat = (await server.post(PATH, CHAT)).json()
        assert (chat["object"], chat["choices"][0]["message"]["content"]) == ("chat.completion", "hello")
        completion = (await server.post(PATH, {"prompt": "hi"})).json()
        assert (completion["object"], completion["choices"][0]["text"]) == ("text_completion", "hello")
        for body in (CHAT, {"prompt": "hi"}):
            chunks = chunks_of((await server.post(PATH, {**body, "stream": True})).text)
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        unknown = await server.post(PATH, {"prompt": "hi", "heat": 1})
        assert unknown.headers["x-quire-ignored-fields"] == "heat"


@pytest.mark.parametrize(
    ("tasks", "body", "kind"),
    [
        (("embed", "classify"), {"input": "hi"}, "embedding"),
        (("classify",), {"input": "hi"}, "probs"),
        (("token_embed",), {"input": "hi"}, "pooling"),
        (("embed", "token_embed"), {"input": "hi", "task": "token_embed"}, "pooling"),
        (("embed",), CHAT, "embedding"),
        (("classify",), CHAT, "probs"),
        (("embed",), {**CHAT, "task": "embed"}, "pooling"),
        (("score",), {"text_1": "a", "text_2": "b"}, "score"),
        (("score",), {"queries": "a", "items": "b"}, "score"),
        (("score",), {"query": "a", "documents": ["b"]}, "relevance_score"),
        (("score",), {"query": "a", "texts": ["b"]}, '"index"'),
        (("embed",), {"inputs": "a"}, "[["),
        (("classify",), {"inputs": "a"}, "label"),
    ],
)
async def test_models_that_pool_are_invoked(
    tmp_path: Path, tasks: tuple[str, ...], body: dict[str, Any], kind: str
) -> None:
    async with pooling_server(tmp_path, *tasks) as server:
        for path in (PATH, "/"):
            answer = await server.post(path, body)
            assert answer.status_code == 200, answer.text
            assert kind in answer.text


@pytest.mark.parametrize(
    ("body", "complaint", "param"),
    [
        ({"input": "hi"}, "Unsupported task: 'embed'", "model"),
        ([], "`messages`, for a chat", None),
        ({}, "`messages`, for a chat", None),
        ({"messages": []}, "messages: ", "messages"),
        ({"messages": [{"content": 1}]}, "messages[0]", "messages[0].role"),
        ({"prompt": "hi", "n": 0}, "n: ", "n"),
        ({**CHAT, "audio": {"voice": "a"}}, "`audio` is not supported", "audio"),
        ({**CHAT, "prompt": "hi", "model": "none"}, "none", None),
    ],
)
async def test_what_is_wrong_is_named(tmp_path: Path, body: Any, complaint: str, param: str | None) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post(PATH, body)
    assert answer.status_code == (404 if "none" in complaint else 400)
    error = answer.json()["error"]
    assert complaint in error["message"]
    assert error["param"] == param or "none" in complaint


async def test_sessions_of_sagemaker_are_refused_by_name(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore(answer=says("hello"))) as server:
        for body in ({"requestType": "NEW_SESSION"}, {"requestType": "CLOSE"}, {**CHAT, "requestType": 5}):
            answer = await server.post(PATH, body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "requestType")
        for name in ("X-Amzn-SageMaker-Session-Id", "X-Amzn-SageMaker-Adapter-Identifier"):
            answer = await server.post(PATH, CHAT, headers={name: "a"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
