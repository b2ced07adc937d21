"""Facts of a request's head: its id and that of its answer, its path, and its key."""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Iterable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from quire import __version__
from quire.engine.client.origin import RANK_HEADER, Origin, RequestNotes, current_origin, set_current_origin
from quire.engine.client.trace_context import TraceContext

REQUEST_ID = "x-request-id"
ARRIVED = "arrived"  # key of a request's state: monotonic seconds when its head had been read
_TRACE_PARENT, _TRACE_STATE = b"traceparent", b"tracestate"
_HEADER = REQUEST_ID.encode()
_UNSAFE = re.compile(r"[^\w.:-]")
_MAX_LENGTH = 128  # of an id, and of a traceparent that may be valid


def new_request_id() -> str:
    """32 hexadecimal digits."""
    return uuid.uuid4().hex


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The id of a request: from its header, or a new one."""
    header = next((value for name, value in headers if name == _HEADER), b"")
    return clean_request_id(header.decode("latin-1")) if header else new_request_id()


def set_origin(scope: Scope, operation: str) -> None:
    """Set the origin of the current task's requests to the engine from the HTTP request or handshake.

    `operation`: see `RequestNotes`.
    """
    state = scope.get("state", {})  # Quire's own server has put the id and the time into it
    set_current_origin(
        Origin(
            state.get("request_id", ""),
            _client_span(scope),
            state.get(ARRIVED, 0.0),
            notes=RequestNotes(operation),
            data_parallel_rank=_rank(scope),
        )
    )


def _rank(scope: Scope) -> str:
    """What a request says about the replica that it asks for; empty if it says nothing."""
    header = RANK_HEADER.encode()
    values = [value for name, value in scope["headers"] if name == header]
    return b",".join(values).decode("latin-1").strip() if values else ""


def _client_span(scope: Scope) -> TraceContext | None:
    """The span of the client of which a request is a part; None without one, or with several."""
    parents = [value for name, value in scope["headers"] if name == _TRACE_PARENT]
    if len(parents) != 1 or len(parents[0]) > _MAX_LENGTH:
        return None
    states = [value for name, value in scope["headers"] if name == _TRACE_STATE]
    return TraceContext.parse(parents[0].decode("latin-1"), b",".join(states).decode("latin-1"))


def clean_request_id(request_id: str) -> str:
    """A client's own request id, with characters that are unsafe in headers and logs replaced."""
    return _UNSAFE.sub("_", request_id[:_MAX_LENGTH])


def answer_id(kind: str, request: Request, requested: str | None) -> str:
    """`kind-` and the id of the request: from its header, from its body, or generated."""
    from_body = requested if request.headers.get(REQUEST_ID) is None else None
    request_id = clean_request_id(from_body) if from_body else request.scope["state"]["request_id"]
    current_origin().notes.answer_id = whole = f"{kind}-{request_id}"
    return whole


def foreign_origin(headers: Headers, allowed: Collection[str]) -> str | None:
    """The origin of the web page that sends a request, if it is neither this server nor allowed."""
    origin = headers.get("origin")
    if origin is None or "*" in allowed or origin in allowed:
        return None
    address = origin.partition("://")[2]
    return None if address and address == headers.get("host") else origin


def fingerprint() -> str:
    """`system_fingerprint` of responses: identifies the version that generated them."""
    return f"quire-{__version__}"


def path_below(root: str, path: str) -> str:
    """A path without a prefix, if it has it: with --root-path, a reverse proxy may or may not strip one."""
    return path[len(root) :] if root and (path == root or path.startswith(f"{root}/")) else path


def endpoint_path(scope: Scope) -> str:
    """The path of a request as it is without --root-path."""
    return path_below(scope.get("root_path", ""), scope["path"])


def put_below(root: str, scope: Scope) -> None:
    """Give a request its path with the prefix, as ASGI wants it, whether or not it was stripped."""
    scope["root_path"] = root
    scope["path"] = root + path_below(root, scope["path"])


KEY_PROTOCOL = "openai-insecure-api-key."  # browsers can set no header of a WebSocket but its subprotocols


def subprotocols(headers: Headers) -> list[str]:
    """The subprotocols that a WebSocket client offers."""
    return [name.strip() for value in headers.getlist("sec-websocket-protocol") for name in value.split(",")]


def key_of(headers: Headers) -> bytes:
    """The key from OpenAI's header, Anthropic's or a subprotocol, as the client has encoded it; empty without one.

    Two different headers of one name have no key: a proxy may have checked the other one.
    """
    if any(len(set(headers.getlist(name))) > 1 for name in ("authorization", "x-api-key")):
        return b""
    scheme, _, token = headers.get("authorization", "").encode("latin-1").partition(b" ")
    if scheme.lower() == b"bearer":
        return token.strip()
    if key := headers.get("x-api-key", ""):
        return key.encode("latin-1")
    offered = (name for name in subprotocols(headers) if name.startswith(KEY_PROTOCOL))
    return next(offered, "").removeprefix(KEY_PROTOCOL).encode("latin-1")
