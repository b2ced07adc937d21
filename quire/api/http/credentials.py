"""The API key of a request, wherever its client puts it."""

from __future__ import annotations

from starlette.datastructures import Headers

KEY_PROTOCOL = "openai-insecure-api-key."  # browsers can set no header of a WebSocket but its subprotocols


def subprotocols(headers: Headers) -> list[str]:
    """The subprotocols that a WebSocket client offers."""
    return [name.strip() for value in headers.getlist("sec-websocket-protocol") for name in value.split(",")]


def key_of(headers: Headers) -> bytes:
    """The key from OpenAI's header, Anthropic's or a subprotocol, as the client has encoded it; empty without one."""
    scheme, _, token = headers.get("authorization", "").encode("latin-1").partition(b" ")
    if scheme.lower() == b"bearer":
        return token.strip()
    if key := headers.get("x-api-key", ""):
        return key.encode("latin-1")
    offered = (name for name in subprotocols(headers) if name.startswith(KEY_PROTOCOL))
    return next(offered, "").removeprefix(KEY_PROTOCOL).encode("latin-1")
