"""Ids of requests and responses, and the fingerprint of this server."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

from starlette.requests import Request

from quire import __version__

REQUEST_ID = "x-request-id"
_HEADER = REQUEST_ID.encode()
_UNSAFE = re.compile(r"[^\w.:-]")
_MAX_LENGTH = 128


def new_request_id() -> str:
    """32 hexadecimal digits."""
    return uuid.uuid4().hex


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The id of a request: from its header, or a new one."""
    header = next((value for name, value in headers if name == _HEADER), b"")
    return clean_request_id(header.decode("latin-1")) if header else new_request_id()


def clean_request_id(request_id: str) -> str:
    """A client's own request id, with characters that are unsafe in headers and logs replaced."""
    return _UNSAFE.sub("_", request_id[:_MAX_LENGTH])


def answer_id(kind: str, request: Request, requested: str | None) -> str:
    """`kind-` and the id of the request: from its header, from its body, or generated."""
    if request.headers.get(REQUEST_ID) is None and requested:
        return f"{kind}-{clean_request_id(requested)}"
    return f"{kind}-{request.scope['state']['request_id']}"


def fingerprint() -> str:
    """`system_fingerprint` of responses: identifies the version that generated them."""
    return f"quire-{__version__}"
