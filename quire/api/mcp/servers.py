"""The MCP servers that the operator allows, and those of their tools that a request names."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import orjson

from quire.api.http.errors import InvalidRequest
from quire.api.mcp.errors import ToolServerFailed
from quire.api.mcp.outcome import CallOutcome, Endpoint, RemoteTool, arguments_of, protocol_error
from quire.api.protocol.mcp import McpTool, ToolFilter

_INVALID_PARAMS, _INTERNAL_ERROR = -32602, -32603  # JSON-RPC's codes
# What the transport itself says, or what would lead a request elsewhere.
_OURS = frozenset(
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
        label: as the request calls the server.
    """

    label: str
    server: Endpoint
    tools: Sequence[RemoteTool]

    async def call(self, name: str, arguments: str) -> CallOutcome:
        """Call one of the tools with the JSON that the model wrote; what fails is an outcome too."""
        from quire.api.mcp.client import call_tool  # noqa: PLC0415 see ToolServers

        given = arguments_of(arguments)
        if given is None:
            return CallOutcome(error=protocol_error(_INVALID_PARAMS, f"The arguments are no JSON object: {arguments}"))
        try:
            return await call_tool(self.server, name, given)
        except ToolServerFailed as error:
            return CallOutcome(error=error.detail)


class ToolServers:
    """Servers by label. Without any, their client's library is never imported."""

    def __init__(self, urls: Mapping[str, str], patience: float) -> None:
        """`patience`: seconds that a list or a call may take."""
        self._urls = urls
        self._patience = patience
        if urls:  # now, as it takes half a second of the event loop
            importlib.import_module("quire.api.mcp.client")

    async def offered(self, entries: Sequence[tuple[int, McpTool]]) -> list[OfferedTools]:
        """The tools that a request names; `entries` are with their places in its `tools`.

        Raises:
            InvalidRequest: naming what cannot be granted.
            ToolServerFailed: a server did not list its tools.
        """
        labels, urls = set[str](), list[str]()
        for place, tool in entries:
            _check(tool, f"tools.{place}")
            url = self._url(tool, f"tools.{place}")
            if tool.server_label in labels or url in urls:
                raise InvalidRequest(f"The `tools` name the MCP server {tool.server_label!r} twice.", "tools")
            labels.add(tool.server_label)
            urls.append(url)
        asked = zip(entries, urls, strict=True)
        return await asyncio.gather(*(self._listed(tool, url, place) for (place, tool), url in asked))

    def _url(self, tool: McpTool, where: str) -> str:
        if tool.server_url is not None:
            if tool.server_url not in self._urls.values():
                raise InvalidRequest(
                    f"The server {tool.server_url!r} is none of those that --tool-server allows.", f"{where}.server_url"
                )
            return tool.server_url
        if tool.server_label not in self._urls:
            raise InvalidRequest(
                f"There is no MCP server {tool.server_label!r}; --tool-server names those that there are.",
                f"{where}.server_label",
            )
        return self._urls[tool.server_label]

    async def _listed(self, tool: McpTool, url: str, place: int) -> OfferedTools:
        from quire.api.mcp.client import list_tools  # noqa: PLC0415 see above

        headers = dict(tool.headers or {})
        if tool.authorization is not None:
            headers["Authorization"] = f"Bearer {tool.authorization}"
        server = Endpoint(url, headers, self._patience)
        try:
            known = await list_tools(server)
            tools = list(_allowed(tool.allowed_tools, known, tool.server_label, f"tools.{place}.allowed_tools"))
            for one in tools:
                _check_writable(one)
        except ToolServerFailed as error:
            text = f"The tools of MCP server {tool.server_label!r} cannot be listed: {error}"
            raise ToolServerFailed(error.detail, text) from error
        return OfferedTools(tool.server_label, server, tools)


def _check_writable(tool: RemoteTool) -> None:
    try:
        orjson.dumps(tool.told())
    except TypeError as error:  # numbers of more than 64 bits, or too deep
        message = f"the tool {tool.name!r} cannot be written down: {error}"
        raise ToolServerFailed(protocol_error(_INTERNAL_ERROR, message)) from error


def _check(tool: McpTool, where: str) -> None:
    if tool.require_approval != "never":
        raise InvalidRequest(
            'Nobody can approve calls here: `require_approval` must be "never".', f"{where}.require_approval"
        )
    for name in ("connector_id", "tunnel_id"):
        if (tool.model_extra or {}).get(name) is not None:
            raise InvalidRequest(f"`{name}` is not supported by this server.", f"{where}.{name}")
    for name in tool.headers or ():
        if name.lower() in _OURS or name.lower().startswith("mcp-"):
            raise InvalidRequest(f"The header {name!r} cannot be given.", f"{where}.headers")
        if name.lower() == "authorization" and tool.authorization is not None:
            raise InvalidRequest("`authorization` is in `headers` as well.", f"{where}.authorization")


def _allowed(
    wanted: list[str] | ToolFilter | None, known: Sequence[RemoteTool], label: str, where: str
) -> Iterator[RemoteTool]:
    if not isinstance(wanted, ToolFilter):
        wanted = ToolFilter(tool_names=wanted)
    names = wanted.tool_names
    there = {tool.name for tool in known}
    for name in names or ():
        if name not in there:
            raise InvalidRequest(f"The MCP server {label!r} has no tool {name!r}.", where)
    for tool in known:
        read_only = (tool.annotations or {}).get("readOnlyHint") is True
        if (names is None or tool.name in names) and wanted.read_only in (None, read_only):
            yield tool
