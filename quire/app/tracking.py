"""Middleware that follows requests from their heads to their ends, for metrics, the access log and traces."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.http.error_handlers import CLIENT_CLOSED
from quire.api.http.request_head import endpoint_path, set_origin
from quire.api.http.sse import RAW_SEND
from quire.app.access_log import AccessLog
from quire.app.doors import is_page
from quire.app.middleware import UNTRACKED_PATHS, Middleware
from quire.app.request_traces import begin_trace, end_trace, operation_of
from quire.app.server_timing import HEADER as SERVER_TIMING
from quire.app.server_timing import server_timing
from quire.engine.client.origin import current_origin
from quire.metrics.batches import trace_of
from quire.metrics.http import AnsweredRequest
from quire.metrics.prometheus import Metrics
from quire.serving.models import ServerState
from quire.tracing.tracing import Tracing


def request_tracking(
    state: ServerState, metrics: Metrics, access_log: AccessLog, tracing: Tracing | None = None
) -> Middleware:
    """Count, time, log and trace requests, and say in each answer where its time went.

    Probes and scrapes are only logged, if at all; realtime sessions are not counted, the page is not traced.
    """

    def layer(app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await app(scope, receive, send)
                return
            is_tracked, is_logged = endpoint_path(scope) not in UNTRACKED_PATHS, access_log.includes(scope)
            if not is_tracked and not is_logged:
                await app(scope, receive, send)
                return
            answer = _Answer(send, with_timing=is_tracked)
            try:
                with _tracked(scope, send, answer) if is_tracked else nullcontext():
                    await app(scope, receive, answer.send)
            finally:
                if is_logged:
                    access_log.write(scope, answer.status or CLIENT_CLOSED, is_complete=answer.is_complete)

        @contextmanager
        def _tracked(scope: Scope, send: Send, answer: _Answer) -> Iterator[None]:
            """A context in which a request is answered."""
            set_origin(scope, operation_of(scope))
            with _counted(scope, send, answer) if scope["type"] == "http" else nullcontext():
                if tracing is None or is_page(scope, endpoint_path(scope)):
                    yield
                    return
                trace = begin_trace(tracing, scope)
                try:
                    yield
                except BaseException as error:
                    trace.error, trace.failed = type(error).__name__, True
                    raise
                finally:
                    trace.status = answer.status
                    end_trace(tracing, trace, scope, is_complete=answer.is_complete)

        @contextmanager
        def _counted(scope: Scope, send: Send, answer: _Answer) -> Iterator[None]:
            scope[RAW_SEND] = send
            started = time.monotonic()
            state.in_flight += 1
            try:
                yield
            finally:
                del scope[RAW_SEND]  # a cycle: what sends refers to the scope
                state.in_flight -= 1
                ended = time.monotonic()
                metrics.http.answered.add(
                    AnsweredRequest(
                        method=scope["method"],
                        handler=getattr(scope.get("route"), "path", "unmatched"),
                        status=answer.status or CLIENT_CLOSED,
                        ended=ended,
                        seconds=ended - started,
                        trace_id=trace_of(current_origin()),
                    )
                )

        return handle

    return layer


class _Answer:
    """Send the answer to a request, with the header Server-Timing.

    Attributes:
        status: its status; None before it begins.
        is_complete: all of it was sent.
    """

    def __init__(self, send: Send, *, with_timing: bool) -> None:
        self.status: int | None = None
        self.is_complete = False
        self._send = send
        self._with_timing = with_timing

    async def send(self, message: Message) -> None:
        """Send a part of the answer."""
        match message["type"]:
            case "http.response.start":
                self.status = message["status"]
                origin = current_origin()
                if self._with_timing and origin.arrived:
                    MutableHeaders(scope=message)[SERVER_TIMING] = server_timing(origin)
            case "http.response.body" | "websocket.http.response.body":
                self.is_complete = not message.get("more_body", False)
            case "websocket.http.response.start":
                self.status = message["status"]
            case "websocket.accept":
                self.status, self.is_complete = HTTPStatus.SWITCHING_PROTOCOLS, True
        await self._send(message)
