"""Names of answers and of this server."""

from __future__ import annotations

import re
import uuid

from starlette.requests import Request

from quire import __version__

REQUEST_ID = "x-request-id"
_UNSAFE = re.compile(r"[^\w.:-]")
_LONGEST = 128


def new_request_id() -> str:
    """32 hexadecimal digits."""
    return uuid.uuid4().hex


def clean_request_id(given: str) -> str:
    """A client's own id, without what does not belong into headers and logs."""
    return _UNSAFE.sub("_", given[:_LONGEST])


def answer_id(kind: str, request: Request, wanted: str | None) -> str:
    """`kind-` and the id of the request: its header's, the body's, or the one that was made for it."""
    if request.headers.get(REQUEST_ID) is None and wanted:
        return f"{kind}-{clean_request_id(wanted)}"
    return f"{kind}-{request.scope['state']['request_id']}"


def fingerprint() -> str:
    """What of this server may change an answer."""
    return f"quire-{__version__}"
