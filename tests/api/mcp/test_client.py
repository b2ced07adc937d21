"""The bundled model, OpenAI's client and a server of tools, all of them real."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai

from tests.support.mcp_server import mcp_server
from tests.support.process import serving


async def test_the_bundled_model_uses_a_tool(tmp_path: Path) -> None:
    async with mcp_server() as tools:
        flags = ("--tool-server", f"weather={tools.url}", "--response-store", f"sqlite:///{tmp_path}/r.db")
        with serving(*flags) as server:
            client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
            weather: Any = {
                "type": "mcp",
                "server_label": "weather",
                "allowed_tools": ["get_weather"],
                "require_approval": "never",
            }
            async with client, asyncio.timeout(120):
                response = await client.responses.create(
                    model="quire-nano", input="What is the weather in Paris?", tools=[weather], temperature=0
                )
    assert tools.calls == [("get_weather", {"city": "Paris"})]
    (made,) = [item for item in response.output if item.type == "mcp_call"]
    assert made.output == "21 degrees in Paris"
    assert "21" in response.output_text
