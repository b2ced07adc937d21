"""`--tool-server`: where MCP servers are, and what they are called."""

from __future__ import annotations

import pytest

from quire.config.command import ConfigError
from quire.config.commands import Serve
from quire.config.types import urls_by_label


def test_servers_have_labels() -> None:
    settings = Serve.parse(["--tool-server", "http://a.example/mcp?x=1,b.example:81", "--tool-server", "c=https://d/e"])
    assert urls_by_label(settings.tool_server) == {
        "a.example": "http://a.example/mcp?x=1",
        "b.example": "http://b.example:81/mcp",
        "c": "https://d/e",
    }


@pytest.mark.parametrize(
    "servers", ["ftp://a/mcp", "http://", "a=", "a:port", "http://a:99999/mcp", "a:1,a:2", "x=a:1,x=b:1"]
)
def test_what_is_no_server_is_refused(servers: str) -> None:
    with pytest.raises(ConfigError, match="--tool-server expects URL"):
        Serve.parse(["--tool-server", servers])
