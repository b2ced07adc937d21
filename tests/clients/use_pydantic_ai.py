"""Pydantic AI: chat, streaming, tool calls and structured outputs."""
# needs: pydantic-ai-slim[openai]>=2.68,<3

from __future__ import annotations

import asyncio

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from questions import DEGREES, LONG, MODEL, NAME, SUM, TOTAL, URL, WEATHER, get_weather


class Sum(BaseModel):
    """A sum."""

    total: int


async def main() -> None:
    provider = OpenAIProvider(base_url=URL, api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(MODEL, provider=provider)
        settings = {"temperature": 0.0}
        agent = Agent(model, model_settings=settings)
        assert TOTAL in (await agent.run(SUM)).output

        async with agent.run_stream(LONG) as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
        assert len(pieces) > 2
        assert NAME in "".join(pieces)

        assert DEGREES in (await Agent(model, tools=[get_weather], model_settings=settings).run(WEATHER)).output

        structured = Agent(model, output_type=NativeOutput(Sum), model_settings=settings)
        assert isinstance((await structured.run(SUM)).output, Sum)


asyncio.run(main())
