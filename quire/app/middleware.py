"""ASGI middleware: metrics, authentication, limits."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.http.credentials import key_of
from quire.api.http.paths import endpoint_path
from quire.api.http.sse import RAW_SEND
from quire.api.http.tenant import API_KEY, ApiKey
from quire.metrics.prometheus import Metrics
from quire.protocol.errors import TooLarge, Unauthorized, Unavailable
from quire.serving.models import ServerState

PAGE_FILES = "/page/"
PROBE_PATHS = frozenset({"/health", "/ready", "/ping"})  # need no API key
_UNTRACKED_PATHS = PROBE_PATHS | {"/metrics", "/load", "/version"}
Middleware = Callable[[ASGIApp], ASGIApp]


def apply_middleware(app: ASGIApp, layers: Sequence[Middleware]) -> ASGIApp:
    """The app inside all layers; the first layer is the outermost."""
    for layer in reversed(layers):
        app = layer(app)
    return app


def request_tracking(state: ServerState, metrics: Metrics) -> Middleware:
    """Record the count and duration of requests."""

    def layer(app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or endpoint_path(scope) in _UNTRACKED_PATHS:
                await app(scope, receive, send)
                return
            status = 499  # if the client disconnects before the response

            async def with_status(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            scope[RAW_SEND] = send
            started = time.monotonic()
            state.in_flight += 1
            try:
                await app(scope, receive, with_status)
            finally:
                del scope[RAW_SEND]  # a cycle: what sends refers to the scope
                state.in_flight -= 1
                handler = getattr(scope.get("route"), "path", "unmatched")
                metrics.http_requests.labels(scope["method"], handler, f"{status // 100}xx").inc()
                metrics.http_seconds.labels(scope["method"], handler).observe(time.monotonic() - started)

        return handle

    return layer


def refusal_while_draining(state: ServerState) -> Middleware:
    """Refuse new requests while the server shuts down, except health, metrics and version."""
    refusal = Unavailable(
        "The server is shutting down and accepts no new requests.", headers={"Retry-After": "1", "Connection": "close"}
    )

    def layer(app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            if not state.draining or scope["type"] == "lifespan" or endpoint_path(scope) in _UNTRACKED_PATHS:
                await app(scope, receive, send)
            else:
                await refusal.response(endpoint_path(scope))(scope, receive, send)

        return handle

    return layer


def authentication(keys: Sequence[ApiKey], may_open_session: Callable[[str], bool]) -> Middleware:
    """Refuse requests without one of the API keys. Probes and the built-in page need no key.

    Args:
        keys: the API keys.
        may_open_session: whether a client secret is valid, which opens realtime sessions.
    """
    accepted = [(encoded, key) for key in keys for encoded in _encodings(key.text)]

    def layer(app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan" or endpoint_path(scope) in PROBE_PATHS or _is_page(scope):
                await app(scope, receive, send)
                return
            given = key_of(Headers(scope=scope))
            matches = [key for encoded, key in accepted if hmac.compare_digest(given, encoded)]  # all, in constant time
            if matches:
                scope[API_KEY] = matches[0]
                await app(scope, receive, send)
            elif scope["type"] == "websocket" and may_open_session(given.decode("latin-1")):
                await app(scope, receive, send)
            else:
                refusal = Unauthorized("A valid API key is required.", headers={"WWW-Authenticate": "Bearer"})
                await refusal.response(endpoint_path(scope))(scope, receive, send)

        return handle

    return layer


def _is_page(scope: Scope) -> bool:
    """Whether a request is for the built-in page, which shows nothing without a key."""
    if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):  # `POST /` is an endpoint
        return False
    path = endpoint_path(scope)
    return path in ("", "/") or path.startswith(PAGE_FILES)


def _encodings(key: str) -> list[bytes]:
    """A key as clients encode it: most in UTF-8, some in Latin-1."""
    encoded = [key.encode(errors="surrogateescape")]  # a variable may hold any bytes
    with suppress(UnicodeEncodeError):
        encoded.append(key.encode("latin-1"))
    return encoded


def body_limit(maximum: int) -> Middleware:
    """Refuse larger bodies, by their Content-Length or their actual length. Starlette's own responds in plain text."""

    def layer(app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            refusal = TooLarge(f"The body is larger than {maximum} bytes, the limit of this server (--max-body-size).")
            content_length = Headers(scope=scope).get("content-length", "0")
            if content_length.isdigit() and int(content_length) > maximum:  # without reading the body
                await refusal.response(endpoint_path(scope))(scope, receive, send)
                return
            received = 0

            async def counted() -> Message:
                nonlocal received
                message = await receive()
                received += len(message.get("body", b""))
                if received > maximum:
                    raise HTTPException(refusal.status, str(refusal))  # FastAPI converts other exceptions
                return message

            await app(scope, counted, send)

        return handle

    return layer
