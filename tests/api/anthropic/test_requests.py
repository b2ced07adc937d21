"""Requests of the Messages API as the model gets them, over a fake core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.engine.client.protocol import AddRequest
from tests.support.fake_core import FakeCore, says
from tests.support.server import running_server
from tests.support.tokenizer import byte_tokenizer

PATH = "/v1/messages"
TEMPLATE = (
    "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}"
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
CACHED = {"cache_control": {"type": "ephemeral"}}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}, **fields}


def result(content: Any) -> list[dict[str, Any]]:
    call = {"type": "tool_use", "id": "t", "name": "find", "input": {}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": content, **CACHED}]},
    ]


async def prompt_of(folder: Path, **fields: Any) -> str:
    """The prompt that a request becomes."""
    core = FakeCore(answer=says("ok"))
    async with running_server(folder, core, chat_template=TEMPLATE, tool_call_parser="hermes") as server:
        answer = await server.post(PATH, {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **fields})
        assert answer.status_code == 200, answer.text
    (added,) = (message for message in core.received if isinstance(message, AddRequest))
    return byte_tokenizer().decode(added.prompt.tolist(), skip_special_tokens=False)


async def refusal_of(folder: Path, **fields: Any) -> str:
    """The error message of a request."""
    async with running_server(folder, chat_template=TEMPLATE, tool_call_parser="hermes") as server:
        answer = await server.post(PATH, {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return str(error["message"])


async def test_a_deferred_tool_is_offered_once_a_message_refers_to_it(tmp_path: Path) -> None:
    tools = [tool("find"), tool("weather", defer_loading=True, **CACHED), tool("news", defer_loading=True)]
    assert (await prompt_of(tmp_path, tools=tools)).startswith("<find>[user:hi]")
    auto = {"tool_choice": {"type": "auto"}}
    assert (await prompt_of(tmp_path, tools=tools[1:], **auto)).startswith("[user:hi]")
    answer = result([{"type": "tool_reference", "tool_name": "weather"}])
    prompt = await prompt_of(tmp_path, tools=tools, messages=answer)
    assert prompt.startswith("<find><weather>[user:hi]")
    assert "weather" in prompt.partition("[tool:")[2]


async def test_messages_change_the_tools(tmp_path: Path) -> None:
    changes = [
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "find"}},
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "news"}},
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool("weather")}},
        {"type": "text", "text": "Now."},
    ]
    turns = [{"role": "user", "content": "hi"}, {"role": "system", "content": changes}]
    prompt = await prompt_of(tmp_path, tools=[tool("find"), tool("news", defer_loading=True)], messages=turns)
    assert prompt == "<news><weather>[user:hi][system:Now.]"
    turns[1] = {"role": "system", "content": changes[:1]}
    assert await prompt_of(tmp_path, tools=[tool("find")], messages=turns) == "[user:hi]"


async def test_documents_and_search_results_are_read_as_text(tmp_path: Path) -> None:
    text = {"type": "text", "text": "B"}
    plain = {"type": "text", "media_type": "text/plain", "data": "A"}
    blocks = [
        {"type": "document", "title": "T", "source": plain, **CACHED},
        {"type": "document", "source": {"type": "content", "content": [text]}, "citations": {"enabled": False}},
        {"type": "search_result", "source": "http://c", "title": "C", "content": [text]},
    ]
    prompt = await prompt_of(tmp_path, messages=[{"role": "user", "content": blocks}])
    assert prompt == "[user:T\nA\nB\nC\nhttp://c\nB]"
    assert (await prompt_of(tmp_path, messages=result(blocks[:1]))).endswith("[tool:T\nA]")


WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
REFERENCE = {"type": "tool_reference", "tool_name": "nothing"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [tool("find"), WEB_SEARCH]}, ("tools[1]", "'web_search'", "'web_search_20250305'")),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, ("tools[0]", "'bash_20250124'")),
        ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "x"}]}, ("tools[0]", "'mcp_toolset'")),
        ({"messages": [{"role": "user", "content": [PDF]}]}, ("messages[0].content[0]", "must be a PDF file")),
        ({"messages": result([PICTURE])}, ("messages[2].content[0].content[0]", "'image'")),
        ({"messages": result([REFERENCE])}, ("messages[2].content[0].content[0].tool_name", "'nothing'")),
        ({"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]}, ("[0]", "'server_tool_use'")),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, ("messages[0].content[0].text", "required")),
        ({"max_tokens": 100_000}, ("max_tokens",)),
        ({"stop_sequences": [""]}, ("stop_sequences",)),
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, ("mcp_servers",)),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, fields: Any, said: tuple[str, ...]) -> None:
    message = await refusal_of(tmp_path, **fields)
    assert all(part in message for part in said), message
    assert "max_completion_tokens" not in message


@pytest.mark.parametrize(("display", "shown"), [(None, True), ("summarized", True), ("omitted", False)])
async def test_reasoning_can_be_omitted(tmp_path: Path, display: str | None, shown: bool) -> None:
    thinking = {"type": "adaptive", **({} if display is None else {"display": display})}
    core = FakeCore(answer=says("<think>\nso\n</think>\n\nyes"))
    async with running_server(tmp_path, core, reasoning_parser="qwen3") as server:
        body = {"max_tokens": 50, "messages": [{"role": "user", "content": "hi"}], "thinking": thinking}
        answer = await server.post(PATH, body)
        assert answer.status_code == 200, answer.text
    kinds = [block["type"] for block in answer.json()["content"]]
    assert kinds == (["thinking", "text"] if shown else ["text"])
