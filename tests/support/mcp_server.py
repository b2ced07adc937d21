"""A real MCP server on a port of its own, whose tools tests can look into."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ImageContent, TextContent, ToolAnnotations
from pydantic import Field
from starlette.types import Receive, Scope, Send

from tests.support.server import listening


@dataclass
class Tools:
    """What an MCP server was asked, and where it is.

    Attributes:
        calls: of tools, as names and arguments.
        headers: of the HTTP requests.
        waiting: calls of `wait` that have neither ended nor been cancelled.
        release: lets calls of `wait` end.
        picture: what `draw` returns.
    """

    url: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    waiting: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)
    picture: bytes = b""


def _server(seen: Tools) -> MCPServer:
    server = MCPServer("Weather", log_level="CRITICAL")

    @server.tool(description="Get the weather of a city.", annotations=ToolAnnotations(read_only_hint=True))
    def get_weather(city: str) -> str:
        seen.calls.append(("get_weather", {"city": city}))
        return f"21 degrees in {city}"

    @server.tool(description="Always fails.")
    def fail() -> str:
        seen.calls.append(("fail", {}))
        raise ToolError("no such luck")

    @server.tool(description="Has a schema with a number that not every JSON writer takes.")
    def far(number: Annotated[int, Field(le=2**64)]) -> str:
        return str(number)

    @server.tool(description="Draws a picture.", structured_output=False)
    def draw() -> list[TextContent | ImageContent]:
        picture = ImageContent(type="image", data=base64.b64encode(seen.picture).decode(), mime_type="image/png")
        return [TextContent(type="text", text="Look:"), picture]

    @server.tool(description="Waits until it is released.")
    async def wait() -> str:
        seen.calls.append(("wait", {}))
        seen.waiting += 1
        try:
            await seen.release.wait()
        finally:
            seen.waiting -= 1
        return "waited"

    return server


@asynccontextmanager
async def mcp_server(*, old: bool = False, port: int = 0) -> AsyncIterator[Tools]:
    """Serve tools over streamable HTTP, or over the older transport."""
    seen = Tools()
    server = _server(seen)
    app = server.sse_app() if old else server.streamable_http_app()

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        seen.headers.append({name.decode(): value.decode() for name, value in scope.get("headers", ())})
        await app(scope, receive, send)

    async with app.router.lifespan_context(app), listening(watched, port) as url:
        seen.url = f"{url}/sse" if old else f"{url}/mcp"
        yield seen
