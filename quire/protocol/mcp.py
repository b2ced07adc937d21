"""Tools of MCP servers in requests to `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from quire.protocol.common import ListOf, RequestPart, StrictModel, max_keys
from quire.protocol.parts import Part

# Valid names and values of HTTP headers.
_HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,256}$")]
_HeaderValue = Annotated[str, Field(pattern=r"^[\x20-\x7e]*$", max_length=1 << 14)]


class ToolFilter(StrictModel):
    """Selects tools of a server; by default all."""

    tool_names: ListOf[str] | None = None
    read_only: bool | None = Field(
        None, description="true: tools that the server marks as read-only; false: the others"
    )


class McpTool(RequestPart):
    """An MCP server whose tools the model may call."""

    type: Literal["mcp"]
    server_label: Annotated[str, Field(min_length=1)]
    server_url: str | None = None
    allowed_tools: ListOf[str] | ToolFilter | None = None
    require_approval: Any = Field(None, description="must be never")
    headers: Annotated[dict[_HeaderName, _HeaderValue], Field(max_length=64), max_keys(64)] | None = Field(
        None, description="HTTP headers of requests to the MCP server"
    )
    authorization: _HeaderValue | None = Field(None, description="Bearer token of requests to the MCP server")


class ChosenMcpTool(RequestPart):
    """Requires a call of one tool, or of any tool of one server."""

    type: Literal["mcp"]
    server_label: str
    name: str | None = None


class McpListTools(RequestPart):
    """The tools of a server at the time of a response."""

    type: Literal["mcp_list_tools"]
    id: str | None = None
    server_label: str
    tools: ListOf[dict[str, Any]]
    error: Any = None


class McpCall(RequestPart):
    """A call of an MCP tool and its outcome."""

    type: Literal["mcp_call"]
    id: Annotated[str, Field(min_length=1)]
    status: str | None = None
    server_label: str
    name: str
    arguments: str
    output: str | None = None
    error: Any = None
    content: ListOf[Part] | None = Field(None, description="the output with its pictures, if it has any")
