"""The MCP servers that the operator allows, and the tools that requests select from them."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import orjson

from quire.api.mcp.types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    CallOutcome,
    McpServer,
    RemoteTool,
    ToolServerFailed,
    arguments_of,
    protocol_error,
)
from quire.engine.client.origin import activity, current_origin
from quire.protocol.errors import InvalidRequest
from quire.protocol.mcp import McpTool, ToolFilter
from quire.protocol.strict_json import NestedTooDeeply, check_depth
from quire.workers.loop_thread import LoopThread
from quire.workers.shares import Shares

_MEMORY = 128 << 20  # bytes that all servers may send at once; parsed, they take several times as much
_SHOWN = 64  # characters of a tool's name in traces
# Headers of the transport, and headers that would redirect a request.
_RESERVED_HEADERS = frozenset(
    {
        "accept",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "expect",
        "host",
        "last-event-id",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """Tools of one server that a request offers to its model.

    Attributes:
        label: `server_label` of the request.
        thread: calls run in it.
    """

    label: str
    server: McpServer
    tools: Sequence[RemoteTool]
    thread: LoopThread

    async def call(self, name: str, arguments: str) -> CallOutcome:
        """Call a tool with the JSON text that the model wrote. A failure is an outcome."""
        from quire.api.mcp.client import call_tool  # noqa: PLC0415 imported by ToolServers

        parsed = arguments_of(arguments)
        if parsed is None:
            return CallOutcome(
                error=protocol_error(INVALID_PARAMS, f"The arguments are not a JSON object: {arguments}")
            )
        try:
            with activity(f"execute_tool {name[:_SHOWN]}"):
                return await self.thread.run(partial(call_tool, self.server, name, parsed))
        except ToolServerFailed as error:
            return CallOutcome(error=error.detail)


class ToolServers:
    """MCP servers by label. Without servers, the client's library is never imported."""

    def __init__(self, urls: Mapping[str, str], timeout: float, max_answer_size: int, share: float = 1.0) -> None:
        """Make the servers known. No connection is made.

        Args:
            urls: URLs by label.
            timeout: seconds that a list or a call may take.
            max_answer_size: bytes that a server may send for it.
            share: the part of the memory for answers that one tenant may use.
        """
        self._urls = urls
        self._timeout = timeout
        self._max_answer_size = max_answer_size
        self._memory = Shares(max(_MEMORY, 2 * max_answer_size), share)
        self._thread = LoopThread("tools")
        if urls:  # now, as the import blocks the event loop for half a second
            importlib.import_module("quire.api.mcp.client")

    async def aclose(self) -> None:
        """End all lists and calls."""
        await self._thread.aclose()

    async def offered_tools(self, entries: Sequence[tuple[int, McpTool]]) -> list[OfferedTools]:
        """The tools that a request selects. `entries`: the selecting entries with their indices in its `tools`.

        Raises:
            InvalidRequest: an entry is not valid.
            ToolServerFailed: a server did not list its tools.
        """
        labels, urls = set[str](), list[str]()
        for index, tool in entries:
            _check(tool, f"tools[{index}]")
            url = self._url(tool, f"tools[{index}]")
            if tool.server_label in labels or url in urls:
                raise InvalidRequest(f"`tools` contains the MCP server {tool.server_label!r} twice.", "tools")
            labels.add(tool.server_label)
            urls.append(url)
        selected = zip(entries, urls, strict=True)
        return await asyncio.gather(*(self._listed(tool, url, index) for (index, tool), url in selected))

    def _url(self, tool: McpTool, where: str) -> str:
        if tool.server_url is not None:
            if tool.server_url not in self._urls.values():
                raise InvalidRequest(
                    f"MCP server {tool.server_url!r} is not allowed; start the server with --tool-server to allow it.",
                    f"{where}.server_url",
                )
            return tool.server_url
        if tool.server_label not in self._urls:
            known = f" (this server allows {', '.join(self._urls)})" if self._urls else ""
            text = (
                f"There is no MCP server {tool.server_label!r}{known}; start the server with --tool-server to allow it."
            )
            raise InvalidRequest(text, f"{where}.server_label")
        return self._urls[tool.server_label]

    async def _listed(self, tool: McpTool, url: str, index: int) -> OfferedTools:
        from quire.api.mcp.client import list_tools  # noqa: PLC0415 as above

        headers = {**current_origin().trace_headers, **(tool.headers or {})}
        if tool.authorization is not None:
            headers["Authorization"] = f"Bearer {tool.authorization}"
        server = McpServer(url, headers, self._timeout, self._max_answer_size, self._memory)
        try:
            known = await self._thread.run(partial(list_tools, server))
            tools = list(_allowed(tool.allowed_tools, known, tool.server_label, f"tools[{index}].allowed_tools"))
            for listed in tools:
                _check_serialisable(listed)
        except ToolServerFailed as error:
            text = f"The tools of MCP server {tool.server_label!r} cannot be listed: {error}"
            raise ToolServerFailed(error.detail, text) from error
        return OfferedTools(tool.server_label, server, tools, self._thread)


def _check_serialisable(tool: RemoteTool) -> None:
    try:
        orjson.dumps(tool.to_json())
        check_depth(tool.to_json())
    except (TypeError, NestedTooDeeply) as error:  # TypeError: integers of more than 64 bits, for example
        message = f"the tool {tool.name!r} cannot be serialized as JSON: {error}"
        raise ToolServerFailed(protocol_error(INTERNAL_ERROR, message)) from error


def _check(tool: McpTool, where: str) -> None:
    if tool.require_approval != "never":
        raise InvalidRequest(
            'Approval of tool calls is not supported: `require_approval` must be "never".', f"{where}.require_approval"
        )
    for name in ("connector_id", "tunnel_id"):
        if (tool.model_extra or {}).get(name) is not None:
            raise InvalidRequest(f"`{name}` is not supported by this server.", f"{where}.{name}")
    for name in tool.headers or ():
        if name.lower() in _RESERVED_HEADERS or name.lower().startswith("mcp-"):
            raise InvalidRequest(f"The header {name!r} is reserved and cannot be set.", f"{where}.headers")
        if name.lower() == "authorization" and tool.authorization is not None:
            raise InvalidRequest("`authorization` is set twice: in `headers` and as a field.", f"{where}.authorization")


def _allowed(
    allowed: list[str] | ToolFilter | None, known: Sequence[RemoteTool], label: str, where: str
) -> Iterator[RemoteTool]:
    if not isinstance(allowed, ToolFilter):
        allowed = ToolFilter(tool_names=allowed)
    names = None if allowed.tool_names is None else set(allowed.tool_names)
    known_names = {tool.name for tool in known}
    for name in allowed.tool_names or ():
        if name not in known_names:
            raise InvalidRequest(f"The MCP server {label!r} has no tool {name!r}.", where)
    for tool in known:
        read_only = (tool.annotations or {}).get("readOnlyHint") is True
        if (names is None or tool.name in names) and allowed.read_only in (None, read_only):
            yield tool
