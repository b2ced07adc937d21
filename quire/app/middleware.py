"""Middleware, as plain ASGI callables around the app."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.http.errors import TooLarge, Unauthorized
from quire.api.http.identity import REQUEST_ID, clean_request_id, new_request_id
from quire.api.http.sse import RAW_SEND
from quire.api.serving.models import ServerState
from quire.metrics.prometheus import Metrics

_OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})  # for probes, which have no key
_QUIET_PATHS = _OPEN_PATHS | {"/metrics", "/load", "/version"}
Middleware = Callable[[ASGIApp], ASGIApp]


def apply_middleware(app: ASGIApp, layers: Sequence[Middleware]) -> ASGIApp:
    """The app inside all layers, the first one outermost."""
    for layer in reversed(layers):
        app = layer(app)
    return app


def request_tracking(state: ServerState, metrics: Metrics) -> Middleware:
    """Give each request an id, and count and time it."""

    def layer(app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] in _QUIET_PATHS:
                scope.setdefault("state", {})["request_id"] = new_request_id()
                await app(scope, receive, send)
                return
            given = Headers(scope=scope).get(REQUEST_ID)
            request_id = clean_request_id(given) if given else new_request_id()
            scope.setdefault("state", {})["request_id"] = request_id
            status = 499  # the client left before there was an answer

            async def with_id(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                    MutableHeaders(scope=message)[REQUEST_ID] = request_id
                await send(message)

            scope[RAW_SEND] = send
            started = time.monotonic()
            state.in_flight += 1
            try:
                await app(scope, receive, with_id)
            finally:
                state.in_flight -= 1
                handler = getattr(scope.get("route"), "path", "unmatched")
                metrics.http_requests.labels(scope["method"], handler, f"{status // 100}xx").inc()
                metrics.http_seconds.labels(scope["method"], handler).observe(time.monotonic() - started)

        return handle

    return layer


def authentication(keys: Sequence[str]) -> Middleware:
    """Let only clients with one of the keys pass; probes need none."""
    accepted = [key.encode() for key in keys]

    def layer(app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan" or scope["path"] in _OPEN_PATHS:
                await app(scope, receive, send)
                return
            given = _key_of(Headers(scope=scope))
            known = [hmac.compare_digest(given, key) for key in accepted]  # look at every key, always
            if any(known):
                await app(scope, receive, send)
            elif scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": "a valid API key is needed"})
            else:
                refusal = Unauthorized("A valid API key is needed.", headers={"WWW-Authenticate": "Bearer"})
                await refusal.response(scope["path"])(scope, receive, send)

        return handle

    return layer


def _key_of(headers: Headers) -> bytes:
    """The key that a client gives, by OpenAI's header or Anthropic's."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return (token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")).encode()


def body_limit(most: int) -> Middleware:
    """Refuse bodies of more bytes, by their announced or their real length. (Starlette's own answers in plain text.)"""

    def layer(app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            refusal = TooLarge(f"The body is larger than the {most} bytes that this server takes.")
            announced = Headers(scope=scope).get("content-length", "0")
            if announced.isdigit() and int(announced) > most:  # a client that waits for 100 need not send it at all
                await refusal.response(scope["path"])(scope, receive, send)
                return
            received = 0

            async def counted() -> Message:
                nonlocal received
                message = await receive()
                received += len(message.get("body", b""))
                if received > most:
                    raise HTTPException(refusal.status, str(refusal))  # the one kind that FastAPI lets through
                return message

            await app(scope, counted, send)

        return handle

    return layer
