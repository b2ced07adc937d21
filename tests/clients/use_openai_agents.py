"""OpenAI's Agents SDK, with the Responses and the chat completions API."""
# needs: openai-agents>=0.24,<1

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from questions import DEGREES, MODEL, SUM, TOTAL, URL, WEATHER, get_weather


class Sum(BaseModel):
    """A sum."""

    total: int


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model=MODEL, openai_client=client)
        settings = ModelSettings(temperature=0)
        agent = Agent(name="Adder", model=model, model_settings=settings)
        assert TOTAL in (await Runner.run(agent, SUM)).final_output

        streamed = Runner.run_streamed(agent, SUM)
        events = [event async for event in streamed.stream_events() if event.type == "raw_response_event"]
        said = [event.data.delta for event in events if event.data.type == "response.output_text.delta"]
        assert TOTAL in streamed.final_output
        assert "".join(said) == streamed.final_output

        weather = Agent(name="Weather", model=model, model_settings=settings, tools=[function_tool(get_weather)])
        assert DEGREES in (await Runner.run(weather, WEATHER)).final_output

        structured = Agent(name="Adder", model=model, model_settings=settings, output_type=Sum)
        assert isinstance((await Runner.run(structured, SUM)).final_output, Sum)


asyncio.run(main())
