"""Ids of requests and responses, and the fingerprint of this server."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

from starlette.requests import Request
from starlette.types import Scope

from quire import __version__
from quire.engine.client.origin import Origin, set_current_origin

REQUEST_ID = "x-request-id"
ARRIVED = "arrived"  # key of a request's state: monotonic seconds when its head had been read
_TRACE_PARENT = b"traceparent"
_HEADER = REQUEST_ID.encode()
_UNSAFE = re.compile(r"[^\w.:-]")
_MAX_LENGTH = 128


def new_request_id() -> str:
    """32 hexadecimal digits."""
    return uuid.uuid4().hex


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The id of a request: from its header, or a new one."""
    wanted = next((value for name, value in headers if name == _HEADER), b"")
    return clean_request_id(wanted.decode("latin-1")) if wanted else new_request_id()


def set_origin(scope: Scope) -> None:
    """Set the origin of the current task's requests to the engine from the HTTP request or handshake."""
    state = scope["state"]
    parent = next((value for name, value in scope["headers"] if name == _TRACE_PARENT), None)
    if parent is not None and len(parent) > _MAX_LENGTH:
        parent = None
    traceparent = None if parent is None else parent.decode("latin-1")
    set_current_origin(Origin(state["request_id"], traceparent, state[ARRIVED]))


def clean_request_id(given: str) -> str:
    """A client's own request id, with characters that are unsafe in headers and logs replaced."""
    return _UNSAFE.sub("_", given[:_MAX_LENGTH])


def answer_id(kind: str, request: Request, wanted: str | None) -> str:
    """`kind-` and the id of the request: from its header, from its body, or generated."""
    if request.headers.get(REQUEST_ID) is None and wanted:
        return f"{kind}-{clean_request_id(wanted)}"
    return f"{kind}-{request.scope['state']['request_id']}"


def fingerprint() -> str:
    """`system_fingerprint` of responses: identifies the version that generated them."""
    return f"quire-{__version__}"
