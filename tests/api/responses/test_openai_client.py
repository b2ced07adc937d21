"""The bundled model through OpenAI's own client for Responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.support.process import serving

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    store = f"sqlite:///{tmp_path_factory.mktemp('store')}/r.db"
    with serving("--response-store", store) as server, client_of(server.url) as opened:
        yield opened


def ask(client: openai.OpenAI, input_items: Any, **options: Any) -> Any:
    return client.responses.create(model="quire-nano", input=input_items, temperature=0, **options)


def test_answers(client: openai.OpenAI) -> None:
    response = ask(client, "What is 27 + 58?")
    assert "85" in response.output_text
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    again = client.responses.retrieve(response.id)
    assert again.output_text == response.output_text
    assert [item.type for item in client.responses.input_items.list(response.id)] == ["message"]
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_streams(client: openai.OpenAI) -> None:
    with client.responses.stream(model="quire-nano", input="What is 27 + 58?", temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output_text
    assert "85" in text
    later = list(client.responses.retrieve(final.id, stream=True, starting_after=5))
    assert [event.sequence_number for event in later] == list(range(6, later[-1].sequence_number + 1))
    assert later[-1].type == "response.completed"


def test_parses_into_a_class(client: openai.OpenAI) -> None:
    class Sum(BaseModel):
        total: int

    parsed = client.responses.parse(model="quire-nano", input="What is 27 + 58?", text_format=Sum, temperature=0)
    assert isinstance(parsed.output_parsed, Sum)


def test_calls_a_tool_and_reads_its_result(client: openai.OpenAI) -> None:
    first = ask(client, "What is the weather in Paris?", tools=[WEATHER])
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert call.name == "get_weather"
    assert "Paris" in json.loads(call.arguments)["city"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": "21 degrees"}'}
    second = ask(client, [result], previous_response_id=first.id, tools=[WEATHER])
    assert "21" in second.output_text


def test_answers_in_the_background(client: openai.OpenAI) -> None:
    response = ask(client, "What is 27 + 58?", background=True, stream=False)
    (*_, last) = client.responses.retrieve(response.id, stream=True)
    assert last.type == "response.completed"
    assert "85" in client.responses.retrieve(response.id).output_text


def test_a_conversation_outlives_the_server(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/r.db"
    with serving("--response-store", store) as server, client_of(server.url) as client:
        first = ask(client, "My favourite number is 4711.")
    with serving("--response-store", store) as server, client_of(server.url) as client:
        second = ask(client, "What is my favourite number?", previous_response_id=first.id)
        assert "4711" in second.output_text
        assert len(list(client.responses.input_items.list(second.id))) >= 3


def test_a_custom_tool_is_called_with_a_text(client: openai.OpenAI) -> None:
    tool: Any = {"type": "custom", "name": "note", "description": "Write a note."}
    options: dict[str, Any] = {"tools": [tool], "tool_choice": {"type": "custom", "name": "note"}}
    with client.responses.stream(
        model="quire-nano", input="Note that it rains.", temperature=0, max_output_tokens=200, **options
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    call = final.output[-1]
    assert call.type == "custom_tool_call"
    assert call.name == "note"
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == call.input
    items: Any = [{"type": "custom_tool_call_output", "call_id": call.call_id, "output": "noted"}]
    assert ask(client, items, previous_response_id=final.id, max_output_tokens=20).output
    chat = client.chat.completions.create(
        model="quire-nano",
        messages=[{"role": "user", "content": "Note that it rains."}],
        temperature=0,
        max_tokens=200,
        tools=[{"type": "custom", "custom": {"name": "note", "description": "Write a note."}}],
        tool_choice={"type": "custom", "custom": {"name": "note"}},
    )
    calls = chat.choices[0].message.tool_calls or []
    assert [call.custom.input for call in calls if call.type == "custom"] == [call.input]
