"""The allowed MCP servers: `URL` or `HOST:PORT`, optionally with `LABEL=` in front."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema
from pydantic_settings import NoDecode

from quire.config.lists import split_always

_ACCEPTED = "URL or HOST:PORT, optionally with LABEL= in front; labels must differ"
_HOST = re.compile(r"[\w.:-]+")
_LABELLED = re.compile(r"([\w.-]+)=(.+)")


def urls_by_label(servers: Sequence[str]) -> dict[str, str]:
    """URLs by label. The default label is the host name.

    Raises:
        ValueError: an address is not an HTTP address, or two labels are the same.
    """
    urls: dict[str, str] = {}
    for server in servers:
        match = _LABELLED.fullmatch(server)
        label, address = match.groups() if match else (None, server)
        url = address if "://" in address else f"http://{address}/mcp"
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not _HOST.fullmatch(parts.hostname or ""):
            raise ValueError(f"{address!r} is not an HTTP address")
        _ = parts.port  # raises if it is not valid
        label = str(label or parts.hostname)
        if label in urls:
            raise ValueError(f"two servers have the label {label!r}")
        urls[label] = url
    return urls


def _checked(servers: tuple[str, ...]) -> tuple[str, ...]:
    urls_by_label(servers)
    return servers


ToolServers = Annotated[
    tuple[str, ...],
    NoDecode,
    BeforeValidator(split_always),
    AfterValidator(_checked),
    WithJsonSchema({"accepts": _ACCEPTED}),
]
