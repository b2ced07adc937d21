"""Errors of MCP servers."""

from __future__ import annotations

from typing import Any

from quire.protocol.errors import FailedDependency


class ToolServerFailed(FailedDependency):
    """An MCP server cannot be reached, did not answer in time, or violated the protocol.

    Attributes:
        detail: the `error` of an `mcp_call` item.
    """

    def __init__(self, detail: dict[str, Any], message: str | None = None) -> None:
        super().__init__(message or str(detail["message"]), "tools")
        self.detail = detail
