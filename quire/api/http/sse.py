"""Responses that end when their client disconnects: streams of server-sent events, and JSON bodies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.api.http.routing import release_resources
from quire.engine.client.errors import EngineError
from quire.engine.client.origin import current_origin
from quire.multimodal.errors import PromptError
from quire.protocol.errors import ApiError, ClientDisconnected, Internal, as_api_error
from quire.workers.errors import WorkerError
from quire.workers.tenant import take_turn

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_AT_ONCE = 1 << 14  # bytes of events that are sent before others have their turn: a millisecond
RAW_SEND = "quire.send"  # scope key of the server's own `send`: chunks of a stream bypass the middleware


def event(body: Any) -> bytes:
    """An event with a JSON body."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def typed_event(body: Mapping[str, Any]) -> bytes:
    """An event whose name is the `type` of its JSON body."""
    kind: str = body["type"]
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"


class EventStream(Response):
    """A stream of server-sent events. When the client disconnects, the generator is closed at once."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        keepalive: float,
        error: Callable[[ApiError], bytes] = lambda error: event(error.body()),
        done: bytes = DONE,
    ) -> None:
        """Make a stream.

        Args:
            events: encoded events.
            keepalive: seconds of silence after which a comment is sent, as proxies close silent connections; 0: never.
            error: encodes an error that is raised after the stream has begun.
            done: bytes that follow the last event.
        """
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._keepalive = keepalive
        self._error = error
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = asyncio.ensure_future(self._send_events(send, scope.get(RAW_SEND, send)))
        await run_until_disconnect(body, receive)

    async def _send_events(self, send: Send, raw_send: Send) -> None:
        clock = asyncio.get_running_loop().time
        last_sent = clock()
        sent = _AT_ONCE

        async def send_comments() -> None:
            while True:
                await asyncio.sleep(last_sent + self._keepalive - clock())
                await take_turn()  # all streams may have been silent for the same time
                if clock() >= last_sent + self._keepalive:
                    await send_data(_COMMENT)

        async def send_data(data: bytes) -> None:
            nonlocal last_sent, sent
            if sent >= _AT_ONCE:
                sent = 0
                await take_turn()
            last_sent = clock()
            sent = sent + len(data)
            await raw_send({"type": "http.response.body", "body": data, "more_body": True})

        comments = asyncio.ensure_future(send_comments()) if self._keepalive else None
        try:
            async with aclosing(self._with_errors()) as events:
                async for data in events:
                    await send_data(data)
        finally:
            if comments is not None:
                comments.cancel()
        await send({"type": "http.response.body", "body": self._done, "more_body": False})

    async def _with_errors(self) -> AsyncGenerator[bytes, None]:
        """The events; then an event for the error that ended them, if one did."""
        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    yield data
            except ApiError as error:
                _note(error)
                yield self._error(error)
            except (EngineError, PromptError, WorkerError) as error:
                _note(error)
                yield self._error(as_api_error(error))
            except Exception as error:  # nothing above could still send an error response
                _note(error)
                logger.exception("a stream failed")
                yield self._error(Internal("Internal server error"))


def _note(error: Exception) -> None:
    """Note an error that the status of the response does not tell."""
    current_origin().notes.error = type(error).__name__


async def respond_unless_disconnected(request: Request, work: Coroutine[Any, Any, BaseModel]) -> Response:
    """A JSON response with the result of `work`, which is cancelled when the client disconnects.

    What the request holds is released as soon as `work` has ended, however slowly the client reads.

    Raises:
        ClientDisconnected: it was cancelled.
    """
    try:
        body = await unless_disconnected(request, work)
    finally:
        release_resources(request)
    return Response(orjson.dumps(body.model_dump()), media_type="application/json")


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client disconnects.

    Raises:
        ClientDisconnected: it was cancelled.
    """
    task = asyncio.ensure_future(work)
    await run_until_disconnect(task, request.receive)
    if task.cancelled():
        raise ClientDisconnected
    return task.result()


async def run_until_disconnect(work: asyncio.Future[Any], receive: Receive) -> None:
    """Wait for `work`, and cancel it if the client disconnects. It has cleaned up when this returns."""
    disconnect = asyncio.ensure_future(_disconnected(receive))
    disconnect.add_done_callback(lambda _: work.cancel())
    try:
        await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # this task was cancelled, not only `work`
            raise
    finally:
        disconnect.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
