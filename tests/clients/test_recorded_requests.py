"""Requests as applications send them, to the bundled model; the answers are read as these applications read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.clients import recorded_requests as recorded
from tests.support.process import serving

IGNORED = "x-quire-ignored-fields"


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    store = f"sqlite:///{tmp_path_factory.mktemp('store')}/r.db"
    with serving("quire-nano", "--response-store", store) as server, server.http as client:
        yield client


def post(http: httpx.Client, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
    answer = http.post(path, json=body, **options)
    assert answer.status_code == 200, answer.text
    return answer


def events_of(answer: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """Names and bodies of typed events."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for text in answer.text.strip().split("\n\n"):
        name, data = text.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name.removeprefix("event: ") == body["type"]
        events.append((body["type"], body))
    return events


def read_message(answer: httpx.Response, *, streamed: bool) -> dict[str, Any]:
    """A message as Claude Code reads it: its SDK puts the blocks of a stream together."""
    if not streamed:
        whole: dict[str, Any] = answer.json()
        return whole
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for name, event in events_of(answer):
        match name:
            case "message_start":
                message = event["message"]
                assert message["usage"]["input_tokens"] > 0
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
                else:
                    key = delta["type"].removesuffix("_delta")
                    block[key] += delta[key]
            case "content_block_stop":
                if event["index"] in inputs:
                    message["content"][event["index"]]["input"] = json.loads(inputs[event["index"]])
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    assert name == "message_stop"
    return message


@pytest.mark.parametrize("streamed", [True, False])
def test_claude_code(http: httpx.Client, streamed: bool) -> None:
    url, headers = "/v1/messages?beta=true", recorded.CLAUDE_CODE_HEADERS
    first = recorded.claude_code(recorded.CLAUDE_CODE_FIRST, stream=streamed)
    answer = post(http, url, first, headers=headers)
    assert set(answer.headers[IGNORED].split(", ")) == {"context_management", "output_config.effort"}
    message = read_message(answer, streamed=streamed)
    (call,) = message["content"]  # the reasoning is omitted
    assert (message["stop_reason"], call["name"], call["input"]) == ("tool_use", "get_weather", {"city": "Oslo"})
    second = recorded.claude_code(recorded.claude_code_second(call), stream=streamed)
    message = read_message(post(http, url, second, headers=headers), streamed=streamed)
    assert message["stop_reason"] == "end_turn"
    assert "21" in message["content"][0]["text"]
    assert message["usage"]["output_tokens"] > 0


def test_a_web_search_of_claude_code_is_refused_by_name(http: httpx.Client) -> None:
    answer = http.post("/v1/messages?beta=true", json=recorded.CLAUDE_CODE_WEB_SEARCH)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert "web_search_20250305" in answer.json()["error"]["message"]


def test_a_title_of_claude_code_matches_its_schema(http: httpx.Client) -> None:
    form = {"type": "json_schema", "schema": recorded.PERSON}
    messages = [{"role": "user", "content": [{"type": "text", "text": recorded.EXTRACT}]}]
    body = recorded.claude_code(
        messages, tools=[], thinking={"type": "disabled"}, output_config={"format": form}, stream=False
    )
    message = post(http, "/v1/messages?beta=true", body).json()
    assert json.loads(message["content"][0]["text"]) == {"name": "Anna", "age": 33}


def read_response(answer: httpx.Response, *, streamed: bool) -> dict[str, Any]:
    """A response as Codex reads it: items from their last events, and the end from `response.completed`."""
    if not streamed:
        whole: dict[str, Any] = answer.json()
        return whole
    events = events_of(answer)
    assert events[0][0] == "response.created"
    name, last = events[-1]
    assert name == "response.completed"
    items = [event["item"] for name, event in events if name == "response.output_item.done"]
    assert items == last["response"]["output"]
    response: dict[str, Any] = last["response"]
    return response


@pytest.mark.parametrize("streamed", [True, False])
def test_codex(http: httpx.Client, streamed: bool) -> None:
    answer = post(http, "/v1/responses", recorded.codex([], stream=streamed))
    assert "tools[1]" in answer.headers[IGNORED]  # the namespace
    assert "tools[2]" in answer.headers[IGNORED]  # the web search
    assert "client_metadata" not in answer.headers[IGNORED]
    response = read_response(answer, streamed=streamed)
    call = response["output"][-1]
    assert (call["type"], call["name"]) == ("function_call", "get_weather")
    assert json.loads(call["arguments"]) == {"city": "Oslo"}
    assert {"input_tokens", "input_tokens_details", "output_tokens"} <= response["usage"].keys()
    output = {"type": "function_call_output", "id": "fco_1", "call_id": call["call_id"], "output": recorded.RESULT}
    response = read_response(
        post(http, "/v1/responses", recorded.codex([*response["output"], output], stream=streamed)), streamed=streamed
    )
    assert "21" in response["output"][-1]["content"][0]["text"]


def read_chat(answer: httpx.Response, *, streamed: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The message and the usage, as Open WebUI and LiteLLM read them; calls are put together by their index."""
    if not streamed:
        body = answer.json()
        return body["choices"][0]["message"], body["usage"]
    lines = [line for line in answer.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    usage = None
    for line in lines[:-1]:
        chunk = json.loads(line.removeprefix("data: "))
        usage = chunk["usage"] or usage  # null until the end
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append(call)
                else:
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    assert usage is not None
    return message, usage


@pytest.mark.parametrize("streamed", [True, False])
def test_open_webui(http: httpx.Client, streamed: bool) -> None:
    options = {} if streamed else {"stream": False, "stream_options": None}
    turns: list[dict[str, Any]] = [{"role": "user", "content": recorded.WEATHER}]
    message, usage = read_chat(
        post(http, "/v1/chat/completions", recorded.open_webui(turns, **options)), streamed=streamed
    )
    assert usage["completion_tokens"] > 0
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    turns += [
        {"role": "assistant", "content": "", "tool_calls": [{"index": 0, **call}]},
        {"role": "tool", "tool_call_id": call["id"], "content": recorded.RESULT},
    ]
    answer = post(http, "/v1/chat/completions", recorded.open_webui(turns, **options))
    assert IGNORED not in answer.headers
    assert "21" in read_chat(answer, streamed=streamed)[0]["content"]


def test_a_title_of_open_webui(http: httpx.Client) -> None:
    message, _ = read_chat(post(http, "/v1/chat/completions", recorded.OPEN_WEBUI_TITLE), streamed=False)
    assert "85" in message["content"]


@pytest.mark.parametrize("streamed", [True, False])
def test_litellm(http: httpx.Client, streamed: bool) -> None:
    body = recorded.LITELLM_CHAT if streamed else {**recorded.LITELLM_CHAT, "stream": False, "stream_options": None}
    answer = post(http, "/v1/chat/completions", body)
    assert IGNORED not in answer.headers
    assert json.loads(read_chat(answer, streamed=streamed)[0]["content"]) == {"name": "Anna", "age": 33}
    response = read_response(
        post(http, "/v1/responses", {**recorded.LITELLM_RESPONSES, "stream": streamed}), streamed=streamed
    )
    assert response["output"][-1]["name"] == "get_weather"
