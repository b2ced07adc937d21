"""What may go wrong with MCP servers."""

from __future__ import annotations

from typing import Any

from quire.api.http.errors import FailedDependency


class ToolServerFailed(FailedDependency):
    """A server that cannot be reached, takes too long or does not speak MCP.

    Attributes:
        detail: as the `error` of an `mcp_call` item.
    """

    def __init__(self, detail: dict[str, Any], message: str | None = None) -> None:
        super().__init__(message or str(detail["message"]), "tools")
        self.detail = detail
