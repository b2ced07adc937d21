"""The bundled model through Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.process import serving

if TYPE_CHECKING:
    import anthropic

WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
NAME = "claude-alias"


@pytest.fixture(scope="module")
def client() -> Iterator[anthropic.Anthropic]:
    import anthropic  # not where each process collects tests: it takes a second

    with (
        serving("--served-model-name", NAME, "--api-key", "secret") as server,
        anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as opened,
    ):
        yield opened


def ask(client: anthropic.Anthropic, content: Any, **options: Any) -> Any:
    messages: Any = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return client.messages.create(model=NAME, max_tokens=200, messages=messages, **options)


def test_answers(client: anthropic.Anthropic) -> None:
    message = ask(client, "What is 27 + 58?")
    assert [block.type for block in message.content] == ["text"]
    assert "85" in message.content[0].text
    assert (message.stop_reason, message.model, message.role) == ("end_turn", NAME, "assistant")
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens > 0


def test_thinks_aloud_if_that_is_wanted(client: anthropic.Anthropic) -> None:
    message = ask(client, "What is 27 + 58?", thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert "7+8=15" in message.content[0].thinking
    again = [
        {"role": "user", "content": "What is 27 + 58?"},
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [{"type": "text", "text": "What is Quire?"}]},
    ]
    assert "server" in ask(client, again).content[0].text


def test_streams_what_it_says(client: anthropic.Anthropic) -> None:
    whole = ask(client, "What is 27 + 58?", thinking={"type": "enabled", "budget_tokens": 1024})
    with client.messages.stream(
        model=NAME,
        max_tokens=200,
        messages=[{"role": "user", "content": "What is 27 + 58?"}],
        thinking={"type": "enabled", "budget_tokens": 1024},
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert [block.model_dump() for block in final.content] == [block.model_dump() for block in whole.content]
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


@pytest.mark.parametrize("streamed", [False, True])
def test_uses_a_tool_and_its_result(client: anthropic.Anthropic, streamed: bool) -> None:
    question: Any = {"role": "user", "content": "How is the weather in Oslo?"}
    if streamed:
        with client.messages.stream(model=NAME, max_tokens=200, messages=[question], tools=[WEATHER]) as stream:
            message = stream.get_final_message()
    else:
        message = ask(client, [question], tools=[WEATHER])
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"temperature": 21, "condition": "sunny"}'}
    turns = [question, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert "21" in ask(client, turns, tools=[WEATHER]).content[0].text


def test_a_tool_that_has_to_be_used(client: anthropic.Anthropic) -> None:
    message = ask(client, "What is Quire?", tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"})
    assert message.content[0].name == "get_weather"
    assert message.stop_reason == "tool_use"
    assert ask(client, "What is Quire?", tools=[WEATHER], tool_choice={"type": "none"}).content[0].type == "text"


def test_holds_an_answer_to_a_schema(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
        "required": ["name", "age", "city"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    message = ask(client, "Extract name, age and city as JSON: Anna is 33 and lives in Rome.", output_config=form)
    assert json.loads(message.content[0].text) == {"name": "Anna", "age": 33, "city": "Rome"}


def test_generation_ends_at_stop_sequences(client: anthropic.Anthropic) -> None:
    message = ask(client, "What is Quire?", stop_sequences=["server"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "server")
    cut = client.messages.create(model=NAME, max_tokens=2, messages=[{"role": "user", "content": "What is Quire?"}])
    assert cut.stop_reason == "max_tokens"


def test_counts_as_it_will_be_counted(client: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "What is Quire?"}]
    count = client.messages.count_tokens(model=NAME, messages=messages, system="Be brief.", tools=[WEATHER])
    usage = ask(client, messages, system=[{"type": "text", "text": "Be brief."}], tools=[WEATHER]).usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_errors_are_those_that_the_client_knows(client: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="missing", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
    assert missing.value.body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "The model `missing` does not exist."},
    }
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model=NAME, max_tokens=0, messages=[{"role": "user", "content": "hi"}])
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]: .* type 'image'"):
        ask(client, [{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match="name"):
        ask(client, "hi", tools=[WEATHER], tool_choice={"type": "tool"})
    with pytest.raises(anthropic.AuthenticationError):
        ask(client.with_options(api_key="wrong"), "hi")
