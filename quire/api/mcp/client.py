"""A client of MCP servers. Only it and `bounded_http` import the protocol's library, which takes half a second.

Each list and each call uses a new connection, so that servers may restart at any time. All failures are raised
as `ToolServerFailed`. Its functions run in the event loop of a thread, as the library parses what servers send.
"""

from __future__ import annotations

import functools
import json
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import anyio
import httpx2
from anyio import BrokenResourceError, ClosedResourceError, EndOfStream
from mcp import Client, Implementation, MCPError, Tool
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import (
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from quire import __version__
from quire.api.mcp.bounded_http import AnswerBudget, BoundedTransport
from quire.api.mcp.types import (
    INTERNAL_ERROR,
    CallOutcome,
    McpServer,
    RemoteTool,
    ToolServerFailed,
    http_error,
    protocol_error,
    tool_error,
)
from quire.protocol.custom import MAX_TOOLS
from quire.workers.tenant import current_tenant

Result = TypeVar("Result")

_CONNECT_TIMEOUT = 10.0  # seconds
_CLOSE_TIMEOUT = 2.0  # seconds for the end of a session, after its result
_MAX_PAGES = 100  # of a list of tools
_MAX_CODE = 1 << 31  # of error codes of JSON-RPC
# RuntimeError: a server that keeps sending requests.
_FAILURES = (
    MCPError, httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError, RuntimeError,
    BrokenResourceError, ClosedResourceError, EndOfStream,
)  # fmt: skip


async def list_tools(server: McpServer) -> list[RemoteTool]:
    """All tools of a server.

    Raises:
        ToolServerFailed: it cannot be reached, does not answer in time, violates the protocol, or has too many.
    """
    return await _connected(server, _all_tools)


async def call_tool(server: McpServer, name: str, arguments: dict[str, Any]) -> CallOutcome:
    """Call a tool. An error that the tool itself reports is an outcome.

    Raises:
        ToolServerFailed: the server cannot be reached, does not answer in time, or violates the protocol.
    """

    async def call(client: Client) -> CallOutcome:
        # The library would fetch all tools after each call, and check the result against the server's schema: a pattern
        # in it can take hours. The model reads any result.
        client.session.validate_tool_result = _accept  # type: ignore[method-assign]
        result = await client.call_tool(name, arguments)
        texts = _texts(result)
        return tool_error(texts) if result.is_error else CallOutcome("\n".join(texts), content=_content(result))

    return await _connected(server, call)


async def _all_tools(client: Client) -> list[RemoteTool]:
    tools: list[Tool] = []
    cursor = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if len(tools) > MAX_TOOLS:
            raise ToolServerFailed(protocol_error(INTERNAL_ERROR, f"The tool server has more than {MAX_TOOLS} tools."))
        if cursor is None:
            return [_remote_tool(tool) for tool in tools]
    raise ToolServerFailed(
        protocol_error(INTERNAL_ERROR, f"The tool server's list of tools has more than {_MAX_PAGES} pages.")
    )


async def _connected(server: McpServer, work: Callable[[Client], Awaitable[Result]]) -> Result:
    """The result of `work` with a connected client. The library requires that one task enters and exits it."""
    results: list[Result] = []
    scope = anyio.CancelScope(deadline=anyio.current_time() + server.timeout)  # unlike asyncio's, it ends cleanup, too
    budget = AnswerBudget(server.max_answer_size, server.memory, current_tenant(), scope.cancel)
    try:
        with scope:
            async with _http(server, budget) as http, _client(server, http, budget) as client:
                results.append(await work(client))
                scope.deadline = min(scope.deadline, anyio.current_time() + _CLOSE_TIMEOUT)
    except (ExceptionGroup, ToolServerFailed, *_FAILURES) as error:  # the library uses task groups
        cause = _first_cause(error)
        if not results and budget.problem is None:
            if not isinstance(cause, (ToolServerFailed, *_FAILURES)):
                raise
            raise _failure(cause, server.timeout) from error
    finally:
        budget.close()
    if results:
        return results[0]
    if budget.problem is not None:
        raise ToolServerFailed(protocol_error(INTERNAL_ERROR, budget.problem))
    raise _failure(TimeoutError(), server.timeout)


def _client(server: McpServer, http: httpx2.AsyncClient, budget: AnswerBudget) -> Client:
    # The older transport cannot be detected otherwise.
    is_sse = urlsplit(server.url).path.rstrip("/").endswith("/sse")
    transport = (
        sse_client(server.url, httpx_client_factory=lambda *_, **__: _http(server, budget))
        if is_sse
        else streamable_http_client(server.url, http_client=http, max_sse_event_size=server.max_answer_size)
    )
    identity = Implementation(name="quire", version=__version__)
    return Client(transport, client_info=identity, cache=None, mode="legacy" if is_sse else "auto")


async def _accept(name: str, result: CallToolResult) -> None:
    """Accept any result."""


def _http(server: McpServer, budget: AnswerBudget) -> httpx2.AsyncClient:
    limits = httpx2.Timeout(server.timeout, connect=min(server.timeout, _CONNECT_TIMEOUT))
    transport = BoundedTransport(httpx2.AsyncHTTPTransport(verify=_certificates()), budget)
    return httpx2.AsyncClient(headers=dict(server.headers), timeout=limits, transport=transport)


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


def _content(result: CallToolResult) -> list[dict[str, Any]] | None:
    """The parts of a result as content parts of a response's input; None if it has no pictures."""
    if not any(_picture(part) for part in result.content):
        return None
    parts: list[dict[str, Any]] = []
    for part in result.content:
        picture = _picture(part)
        if picture is not None:
            parts.append({"type": "input_image", "image_url": f"data:image;base64,{picture}"})
        else:
            texts = _texts(CallToolResult(content=[part]))
            parts += [{"type": "input_text", "text": text} for text in texts]
    return parts


def _picture(part: ContentBlock) -> str | None:
    """The picture of a part in base64; None if it has none."""
    match part:
        case ImageContent(data=data):
            return data
        case EmbeddedResource(resource=BlobResourceContents(mime_type=str(kind), blob=data)) if kind.startswith(
            "image/"
        ):
            return data
    return None


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _failure(cause: BaseException, timeout: float) -> ToolServerFailed:
    match cause:
        case ToolServerFailed():
            return cause
        case MCPError():
            code = cause.error.code if abs(cause.error.code) < _MAX_CODE else INTERNAL_ERROR
            return ToolServerFailed(protocol_error(code, cause.error.message))
        case TimeoutError() | httpx2.TimeoutException():
            return ToolServerFailed(http_error(504, f"The tool server did not answer within {timeout:g} seconds."))
        case httpx2.HTTPStatusError():  # its own text has the URL, which may contain a key
            code = cause.response.status_code
            return ToolServerFailed(http_error(code, f"The tool server answered with status {code}."))
    return ToolServerFailed(http_error(424, f"The tool server failed: {cause}"))
