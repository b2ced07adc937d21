"""LiteLLM: chat, streaming, tool calls and structured outputs."""
# needs: litellm>=1.80,<2 mcp>=2

from __future__ import annotations

import json

import litellm
from forecast import Forecast
from pydantic import BaseModel
from questions import DEGREES, LONG, MODEL, NAME, SUM, TOTAL, URL, WEATHER, get_weather


class Sum(BaseModel):
    """A sum."""

    total: int


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def ask(messages, **options):
    chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return litellm.completion(
        f"hosted_vllm/{MODEL}", messages=chat, api_base=URL, api_key="none", temperature=0, **options
    )


assert TOTAL in ask(SUM).choices[0].message.content

pieces = [chunk.choices[0].delta.content or "" for chunk in ask(LONG, stream=True)]
assert len(pieces) > 2
assert NAME in "".join(pieces)

message = ask(WEATHER, tools=[TOOL]).choices[0].message
(call,) = message.tool_calls
result = get_weather(**json.loads(call.function.arguments))
turns = [{"role": "user", "content": WEATHER}, message.model_dump(exclude_none=True)]
turns.append({"role": "tool", "tool_call_id": call.id, "content": result})
assert DEGREES in ask(turns, tools=[TOOL]).choices[0].message.content

NESTED = {"type": "function", "function": {"name": "Forecast", "parameters": Forecast.model_json_schema()}}
(call,) = ask(WEATHER, tools=[NESTED], tool_choice="required").choices[0].message.tool_calls
assert "Paris" in Forecast.model_validate_json(call.function.arguments).city

Sum.model_validate_json(ask(SUM, response_format=Sum).choices[0].message.content)
