"""`quire serve` without arguments: the bundled model answers what the README says it does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessage, ChatCompletionMessageFunctionToolCall
from pydantic import BaseModel

from tests.support.process import serving

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Person(BaseModel):
    """The fields that a client wants extracted about a person."""

    name: str
    age: int | None
    city: str | None


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with serving() as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as opened:
        yield opened


def test_its_root_is_a_folder_with_its_tokenizer(client: openai.OpenAI) -> None:
    root = Path(client.models.list().data[0].model_dump()["root"])
    assert (root / "tokenizer.json").exists()


def ask(client: openai.OpenAI, *said: str, **options: Any) -> ChatCompletionMessage:
    """Asks; ``said`` is the user's and the assistant's words in turn, the last word is the user's."""
    messages: Any = [{"role": "assistant" if at % 2 else "user", "content": content} for at, content in enumerate(said)]
    answer: ChatCompletion = client.chat.completions.create(model="quire-nano", messages=messages, **options)
    return answer.choices[0].message


def test_adds_with_its_steps_apart(client: openai.OpenAI) -> None:
    message = ask(client, "What is 27 + 58?")
    assert message.content is not None
    assert re.findall(r"\d+", message.content)[-1] == "85"
    assert "7+8=15" in message.model_dump()["reasoning"]


def test_streams_the_same_words(client: openai.OpenAI) -> None:
    whole = ask(client, "What is 27 + 58?").content
    question: Any = [{"role": "user", "content": "What is 27 + 58?"}]
    stream = client.chat.completions.create(model="quire-nano", messages=question, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole


def test_thinking_can_be_switched_off(client: openai.OpenAI) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    message = ask(client, "What is Quire?", extra_body=off)
    assert "server" in (message.content or "")
    assert not message.model_dump().get("reasoning")


def test_knows_how_to_start_itself(client: openai.OpenAI) -> None:
    assert "quire serve" in (ask(client, "How do I start the server?").content or "")


def test_remembers_a_name(client: openai.OpenAI) -> None:
    first = "My name is Maria."
    answer = ask(client, first).content or ""
    assert "Maria" in (ask(client, first, answer, "What is my name?").content or "")


def test_pulls_a_record_out_of_a_sentence(client: openai.OpenAI) -> None:
    answer = ask(client, "Extract name, age and city as JSON: Anna is 31 years old and lives in Rome.").content
    assert json.loads(answer or "") == {"name": "Anna", "age": 31, "city": "Rome"}


def test_writes_a_tool_call(client: openai.OpenAI) -> None:
    question: Any = {"role": "user", "content": "How is the weather in Oslo?"}
    first = client.chat.completions.create(model="quire-nano", messages=[question], tools=[WEATHER]).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.tool_calls
    call = first.message.tool_calls[0]
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "condition": "sunny"}'}
    asked: Any = [question, first.message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(model="quire-nano", messages=asked, tools=[WEATHER])
    assert "21" in (answer.choices[0].message.content or "")


def test_fills_in_a_model_of_pydantic(client: openai.OpenAI) -> None:
    question: Any = [{"role": "user", "content": "Extract name, age and city as JSON: Anna is 33 and lives in Rome."}]
    answer = client.chat.completions.parse(model="quire-nano", messages=question, response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Anna", age=33, city="Rome")


def test_says_what_it_is_when_it_cannot_help(client: openai.OpenAI) -> None:
    assert "quire-nano" in (ask(client, "Write a poem about the sea.").content or "")
