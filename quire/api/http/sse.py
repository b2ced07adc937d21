"""Answers that end when their client goes away: streams of server-sent events, and plain ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.api.http.errors import ApiError, Internal, as_api_error
from quire.engine.wire.errors import EngineError
from quire.multimodal.errors import PromptError

logger = logging.getLogger(__name__)
_COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
DIRECT = "quire.send"  # where a scope keeps the server's own `send`, for pieces of a stream, which no layer may change
_CLIENT_CLOSED = 499  # nobody reads it; logs and metrics show it


def event(body: Any) -> bytes:
    """One event with a JSON body."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def typed_event(body: Mapping[str, Any]) -> bytes:
    """One event whose JSON body has a type, which names it too."""
    kind: str = body["type"]
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"


class EventStream(Response):
    """Sends events as they come. When the client goes away, the generator is closed at once."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        free: Callable[[], None],
        *,
        keepalive: float,
        error: Callable[[ApiError], bytes] = lambda error: event(error.body()),
        done: bytes = DONE,
    ) -> None:
        """`free` is called at the end, whatever that is; `error` writes one in the middle, `done` stands behind all.

        `keepalive`: seconds of silence after which a comment is sent, as proxies cut silent connections; 0: never.
        """
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._free = free
        self._keepalive = keepalive
        self._error = error
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            body = asyncio.ensure_future(self._send_events(send, scope.get(DIRECT, send)))
            await _first(body, _disconnected(receive))
        finally:
            self._free()

    async def _send_events(self, send: Send, direct: Send) -> None:
        clock = asyncio.get_running_loop().time
        said = clock()

        async def keep_alive() -> None:
            while True:
                await asyncio.sleep(said + self._keepalive - clock())
                if clock() >= said + self._keepalive:
                    await say(_COMMENT)

        async def say(data: bytes) -> None:
            nonlocal said
            said = clock()
            await direct({"type": "http.response.body", "body": data, "more_body": True})

        keeper = asyncio.ensure_future(keep_alive()) if self._keepalive else None
        try:
            async with aclosing(self._with_errors()) as events:
                async for data in events:
                    await say(data)
        finally:
            if keeper is not None:
                keeper.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _with_errors(self) -> AsyncGenerator[bytes, None]:
        """The events, with an error in the middle as an event of its own, and the end behind all."""
        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    yield data
            except ApiError as error:
                yield self._error(error)
            except (EngineError, PromptError) as error:
                yield self._error(as_api_error(error))
            except Exception:  # the stream's edge: the client must see an end
                logger.exception("a stream failed")
                yield self._error(Internal("Internal server error"))
            if self._done:
                yield self._done


async def answer(
    request: Request, work: Coroutine[Any, Any, BaseModel], headers: Mapping[str, str], free: Callable[[], None]
) -> Response:
    """A plain answer with the result of `work`, which is cancelled when the client goes away; `free` ends either."""
    try:
        task = asyncio.ensure_future(work)
        await _first(task, _disconnected(request.receive))
    finally:
        free()
    if task.cancelled():
        return Response(status_code=_CLIENT_CLOSED)
    return Response(task.result().model_dump_json(), headers=dict(headers), media_type="application/json")


async def _first(work: asyncio.Future[Any], gone: Coroutine[Any, Any, None]) -> None:
    """Wait for work or disconnect; what is not done then is cancelled, and has cleaned up when this returns."""
    watch = asyncio.ensure_future(gone)
    try:
        await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (work, watch):
            if not task.done():
                task.cancel()
        await asyncio.wait((work, watch))
    if not work.cancelled() and (error := work.exception()) is not None:
        raise error


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
