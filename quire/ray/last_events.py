"""The error that ends a stream or a session, as Quire itself would have sent it, for a replica that cannot any more."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from starlette.types import Message

from quire.protocol.errors import ApiError

_STREAM = b"text/event-stream"


def is_stream(start: Message) -> bool:
    """Return whether an answer is a stream of server-sent events, by its first message."""
    return any(name.lower() == b"content-type" and value.startswith(_STREAM) for name, value in start["headers"])


def error_event(error: ApiError, path: str) -> bytes:
    """Return the last event of a stream, in the format of the API that the path belongs to."""
    if path.startswith("/v1/messages"):
        return _typed("error", error.anthropic_body())
    if path.startswith("/v1/responses"):
        detail = error.responses_body()["error"]
        fields = {"code": detail["type"], "message": detail["message"], "param": detail["param"]}
        return _typed("error", {"type": "error", **fields})
    return b"data: " + orjson.dumps(error.body()) + b"\n\ndata: [DONE]\n\n"


def session_error(error: ApiError) -> str:
    """Return the error event of a realtime session that ends."""
    detail = {"type": "server_error", "code": "server_error", "message": error.message, "param": None, "event_id": None}
    return orjson.dumps({"type": "error", "error": detail}).decode()


def _typed(name: str, body: Mapping[str, object]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"
