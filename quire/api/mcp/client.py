"""A client of MCP servers. Only this module imports the protocol's library, which takes half a second.

Each list and each call uses a new connection, so that servers may restart at any time. All failures are raised
as `ToolServerFailed`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2
from anyio import BrokenResourceError, ClosedResourceError, EndOfStream
from mcp import Client, Implementation, MCPError, Tool
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, EmbeddedResource, ResourceLink, TextContent, TextResourceContents

from quire import __version__
from quire.api.mcp.errors import ToolServerFailed
from quire.api.mcp.types import CallOutcome, McpServer, RemoteTool, http_error, protocol_error, tool_error

_CONNECT_TIMEOUT = 10.0  # seconds
_MAX_PAGES = 100  # of a list of tools
# RuntimeError: a result that violates the server's own schema, or a server that keeps sending requests.
_FAILURES = (
    MCPError, httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError, RuntimeError,
    BrokenResourceError, ClosedResourceError, EndOfStream,
)  # fmt: skip


async def list_tools(server: McpServer) -> list[RemoteTool]:
    """All tools of a server.

    Raises:
        ToolServerFailed: it cannot be reached, does not answer in time, or violates the protocol.
    """
    tools: list[Tool] = []
    async with _connected(server) as client:
        cursor = None
        for _ in range(_MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
    return [_remote_tool(tool) for tool in tools]


async def call_tool(server: McpServer, name: str, arguments: dict[str, Any]) -> CallOutcome:
    """Call a tool. An error that the tool itself reports is an outcome.

    Raises:
        ToolServerFailed: the server cannot be reached, does not answer in time, or violates the protocol.
    """
    async with _connected(server) as client:
        result = await client.call_tool(name, arguments)
    if result.is_error:
        return tool_error(_texts(result))
    return CallOutcome("\n".join(_texts(result)))


@asynccontextmanager
async def _connected(server: McpServer) -> AsyncIterator[Client]:
    """A connected client. The library requires that one task enters and exits it."""
    # The older transport cannot be detected otherwise.
    is_sse = urlsplit(server.url).path.rstrip("/").endswith("/sse")
    try:
        async with asyncio.timeout(server.timeout), _http(server) as http:
            transport = (
                sse_client(server.url, httpx_client_factory=lambda *_, **__: _http(server))
                if is_sse
                else streamable_http_client(server.url, http_client=http)
            )
            identity = Implementation(name="quire", version=__version__)
            async with Client(
                transport, client_info=identity, cache=None, mode="legacy" if is_sse else "auto"
            ) as client:
                yield client
    except (ExceptionGroup, *_FAILURES) as error:  # the library uses task groups
        cause = _first_cause(error)
        if not isinstance(cause, _FAILURES):
            raise
        raise _failure(cause, server.timeout) from error


def _http(server: McpServer) -> httpx2.AsyncClient:
    limits = httpx2.Timeout(server.timeout, connect=min(server.timeout, _CONNECT_TIMEOUT))
    return httpx2.AsyncClient(headers=dict(server.headers), timeout=limits, verify=_certificates())


@functools.cache
def _certificates() -> ssl.SSLContext:
    """CA certificates, read once, as that takes longer than most calls."""
    return httpx2.create_ssl_context()


def _remote_tool(tool: Tool) -> RemoteTool:
    hints = tool.annotations
    return RemoteTool(
        name=tool.name,
        description=tool.description,
        schema=tool.input_schema,
        annotations=None if hints is None else hints.model_dump(mode="json", by_alias=True, exclude_none=True),
    )


def _texts(result: CallToolResult) -> list[str]:
    """The parts of a result as texts. Of other content only the type is reported."""
    texts = []
    for part in result.content:
        match part:
            case TextContent(text=text) | EmbeddedResource(resource=TextResourceContents(text=text)):
                texts.append(text)
            case ResourceLink(uri=uri):
                texts.append(str(uri))
            case _:
                texts.append(f"[content of type {part.type} cannot be shown]")
    if not texts and result.structured_content is not None:
        texts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return texts


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _failure(cause: BaseException, timeout: float) -> ToolServerFailed:
    match cause:
        case MCPError():
            return ToolServerFailed(protocol_error(cause.error.code, cause.error.message))
        case TimeoutError() | httpx2.TimeoutException():
            return ToolServerFailed(http_error(504, f"The tool server did not answer within {timeout:g} seconds."))
        case httpx2.HTTPStatusError():  # its own text has the URL, which may contain a key
            code = cause.response.status_code
            return ToolServerFailed(http_error(code, f"The tool server answered with status {code}."))
    return ToolServerFailed(http_error(424, f"The tool server failed: {cause}"))
