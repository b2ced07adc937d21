"""What requests to `/v1/responses` say about tools of MCP servers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire.api.protocol.common import ListOf

# What HTTP can carry in a header, and no more.
_HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,256}$")]
_HeaderValue = Annotated[str, Field(pattern=r"^[\x20-\x7e]*$", max_length=1 << 14)]


class ToolFilter(BaseModel):
    """Which of a server's tools are meant: all of them, but for what is said here."""

    model_config = ConfigDict(extra="forbid")

    tool_names: ListOf[str] | None = None
    read_only: bool | None = Field(None, description="those whose server says that they change nothing, or the others")


class McpTool(BaseModel):
    """A server whose tools the model may use, and the server calls."""

    model_config = ConfigDict(extra="allow")

    type: Literal["mcp"]
    server_label: Annotated[str, Field(min_length=1)]
    server_url: str | None = None
    allowed_tools: ListOf[str] | ToolFilter | None = None
    require_approval: Any = Field(None, description="never: nothing else is supported")
    headers: dict[_HeaderName, _HeaderValue] | None = Field(None, description="for requests to the server")
    authorization: _HeaderValue | None = Field(None, description="a Bearer token for the server")


class ChosenMcpTool(BaseModel):
    """The tool that has to be called, or the server whose tools have to be."""

    model_config = ConfigDict(extra="allow")

    type: Literal["mcp"]
    server_label: str
    name: str | None = None


class McpListTools(BaseModel):
    """The tools that a server had."""

    model_config = ConfigDict(extra="allow")

    type: Literal["mcp_list_tools"]
    id: str | None = None
    server_label: str
    tools: ListOf[dict[str, Any]]
    error: Any = None


class McpCall(BaseModel):
    """A call that the server made, and what came of it."""

    model_config = ConfigDict(extra="allow")

    type: Literal["mcp_call"]
    id: Annotated[str, Field(min_length=1)]
    status: str | None = None
    server_label: str
    name: str
    arguments: str
    output: str | None = None
    error: Any = None
