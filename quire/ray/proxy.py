"""Middleware of Ray's HTTP proxies: it says what prompts begin with, and ends streams whose replica has died.

Ray calls `middlewares` in each proxy if its processes have the variable
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=quire.ray.proxy.middlewares. Without it everything works, but requests are
routed by load alone, and a stream whose replica dies ends without an error event.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.http.request_head import endpoint_path
from quire.protocol.errors import ApiError, Unavailable
from quire.ray.last_events import error_event, is_stream, session_error
from quire.ray.prefixes import packed, prefix_hashes

PREFIX = "quire.prefix"  # key of a scope: packed hashes of the prompt's pieces
_MAX_BODY = 2 << 20  # bytes that are read before a request is routed
_MAX_TOTAL = 64 << 20  # bytes of all requests that are held for that
_GOING_AWAY = 1012  # code of a WebSocket's end: service restart


def middlewares() -> list[Middleware]:
    """Return what Ray's proxies put around its app."""
    return [Middleware(ReplicaProxy)]


class ReplicaProxy:
    """An ASGI app around that of a proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._held = 0  # bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "websocket":
            await self._answer_session(scope, receive, send)
        elif scope["type"] == "http":
            scope.pop(PREFIX, None)
            if scope["method"] == "POST" and self._has_short_json(scope):
                await self._answer_prompt(scope, receive, send)
            else:
                await self._answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _has_short_json(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        return (
            headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
            and length.isdigit()
            and 0 < int(length) <= min(_MAX_BODY, _MAX_TOTAL - self._held)
        )

    async def _answer_prompt(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body first, so that the router knows what the prompt begins with."""
        size = int(Headers(scope=scope)["content-length"])
        self._held += size
        try:
            messages = await _messages_of_body(receive)
            hashes = prefix_hashes(b"".join(message.get("body", b"") for message in messages))
        finally:
            self._held -= size
        if hashes:
            scope[PREFIX] = packed(hashes)
        messages.reverse()

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._answer(scope, replay, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and complete an answer that Ray does not complete."""
        started: Message | None = None
        is_complete = False

        async def forward(message: Message) -> None:
            nonlocal started, is_complete
            if message["type"] == "http.response.start":
                started = message
            elif message["type"] == "http.response.body":
                is_complete = not message.get("more_body", False)
            await send(message)

        await self._app(scope, receive, forward)
        if is_complete:
            return
        path = endpoint_path(scope)
        error = Unavailable("The replica that was answering this request has died or was stopped.")
        if started is None:
            await _send_refusal(error, path, scope, receive, send)
        elif is_stream(started):
            await send({"type": "http.response.body", "body": error_event(error, path), "more_body": False})
        # Another answer that has begun must not look complete: its connection is closed.

    async def _answer_session(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a WebSocket; if its replica dies, say so before it is closed."""
        is_open = False

        async def forward(message: Message) -> None:
            nonlocal is_open
            if message["type"] == "websocket.accept":
                is_open = True
            elif message["type"] == "websocket.close":
                is_open = False
            await send(message)

        async def watched() -> Message:
            nonlocal is_open
            message = await receive()
            if message["type"] == "websocket.disconnect":
                is_open = False
            return message

        await self._app(scope, watched, forward)
        if is_open:
            error = Unavailable("The replica that served this session has died or was stopped.")
            await send({"type": "websocket.send", "text": session_error(error)})
            await send({"type": "websocket.close", "code": _GOING_AWAY, "reason": "the replica has died"})


async def _messages_of_body(receive: Receive) -> list[Message]:
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


async def _send_refusal(error: ApiError, path: str, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request that Ray has not answered at all."""

    async def with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            request_id = Headers(scope=scope).get("x-request-id")
            if request_id is not None:
                MutableHeaders(scope=message)["x-request-id"] = request_id
        await send(message)

    await error.response(path)(scope, receive, with_id)
