"""Uvicorn's HTTP protocol with bounds on the size of requests, and on the time to send them and read responses."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import unquote

import httptools
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from quire.api.http.body import RELEASE_BODY
from quire.api.http.request_head import (
    ARRIVED,
    REQUEST_ID,
    endpoint_path,
    new_request_id,
    path_below,
    put_below,
    request_id_of,
)
from quire.api.http.tenant import tenant_of
from quire.app.access_log import AccessLog
from quire.app.arriving_bodies import ArrivingBody
from quire.app.connections import Connections, UnreadResponse, reset
from quire.app.middleware import PROBE_PATHS
from quire.app.websocket import BoundedWebSocket, handshake_of
from quire.protocol.errors import ApiError, HeadersTooLarge, InvalidRequest, Overloaded, TimedOut, UrlTooLong
from quire.workers.eager import run_eagerly
from quire.workers.turns import ARRIVALS, ENDINGS, turns

_MAX_PIPELINED = 64  # requests that a client may send ahead of their responses
_BYTES_PER_SECOND = 1024  # slowest accepted body
_SECONDS_TO_READ_A_REFUSAL = 2.0
_UNSENT = 64 << 10  # bytes of a response in the system's send buffer that are not yet on the network
_WEBSOCKETS = ("/v1/realtime",)


def probe_detector(root_path: str) -> Callable[[bytes], object]:
    """A function that returns something true for the beginning of a probe's request, as probes send it."""
    root, paths = re.escape(root_path.encode()), b"|".join(re.escape(path.encode()) for path in PROBE_PATHS)
    return re.compile(b"(?:GET|HEAD|POST) (?:%b)?(?:%b)[ ?]" % (root, paths)).match


def _without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """The app, for a client of HTTP/1.0, which knows no chunks: a body of unknown length ends with the connection."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_plainly(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not has_length:
                cycle.chunked_encoding = False
                cycle.expected_content_length = len(message.get("body", b""))  # uvicorn counts down to 0
            await send(message)

        await app(scope, receive, send_plainly)

    return handle


class BoundedProtocol(HttpToolsProtocol):
    """One connection. What it may do and for how long is documented in docs/api/errors-and-limits.md.

    At any time a connection waits for one of these, until `_deadline`: a request head, the rest of a body, the next
    request, or that the client has read a refusal. While a request is being answered there is no deadline.

    What uvicorn calls a cycle is a request and its response.
    """

    def __init__(self, table: Connections, access_log: AccessLog, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._table = table
        self._access_log = access_log
        self._limits = table.options
        self._deadline = math.inf
        self._in_head = self._in_body = False
        self._upgrades = self._refused = False
        self._probed = False  # a probe was answered at once; one for what arrives together, as it may be thousands
        self._max_header_count = self._limits.max_header_count
        self._max_header_size = int(self._limits.max_header_size)
        self._max_uncounted = self._max_header_size + int(self._limits.max_url_size)
        self._header_count = self._header_size = 0
        self._uncounted = 0  # bytes of an incomplete header or chunk header
        self._running: RequestResponseCycle | None = None  # the request that is being answered
        self._bodies: dict[RequestResponseCycle, ArrivingBody] = {}
        # uvicorn would put it before paths that have it already
        self._root = self.root_path
        self.root_path = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._unread = UnreadResponse(self._table, transport)
        connected = transport.get_extra_info("socket")
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
        if self._table.add(self):
            self._deadline = self._table.deadline(self._limits.header_timeout)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        for cycle in list(self._bodies):
            self._release_body(cycle)
        self.cycle = None  # type: ignore[assignment]  # uvicorn would wake its app at once
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            turns().run(ENDINGS, self._running.message_event.set)  # thousands of clients may leave together

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        self._probed = False
        self._uncounted += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            after_head = data[upgrade.args[0] :]
            if not self._opens_websocket():
                self._continue_without_upgrade(after_head)
                return
            try:
                self._open_websocket(after_head)
            except ApiError as refusal:
                self._refuse(refusal)
            return
        except httptools.HttpParserError as error:
            self._refuse(_refusal_of(error))
            return
        if self._in_head and self in self._table.idle:
            self._await_head()
        if self._uncounted > self._max_uncounted:
            self._refuse(self._headers_too_large())

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise InvalidRequest(f"More than {_MAX_PIPELINED} requests were sent ahead of their responses.")
        super().on_message_begin()
        self._in_head = True
        self._header_count = self._header_size = self._uncounted = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.max_url_size:
            raise UrlTooLong(
                f"The URL is longer than {self._limits.max_url_size:d} bytes, the limit of this server "
                "(--max-url-size)."
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        self._uncounted = 0
        self._header_count += 1
        self._header_size += len(name) + len(value)
        if self._header_count > self._max_header_count or self._header_size > self._max_header_size:
            raise self._headers_too_large()
        if self._in_head:  # not one after a chunked body, which nothing reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise InvalidRequest("This server is not a proxy: it does not support the method CONNECT.")
            self._upgrades = True
            return
        if [name for name, _ in self.headers].count(b"host") > 1:
            raise InvalidRequest("The request has more than one Host header.")
        super().on_headers_complete()
        self._in_head, self._in_body = False, True
        self._deadline = math.inf if self.pipeline else self._table.deadline(self._limits.body_timeout)

    def on_body(self, body: bytes) -> None:
        self._uncounted = 0
        if self._deadline != math.inf:
            latest = self._table.deadline(self._limits.body_timeout)
            self._deadline = min(self._deadline + len(body) / _BYTES_PER_SECOND, latest)
        self._count_body(self.cycle, len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrades:
            return
        self._in_body = False
        if self.cycle in self._bodies:
            self._bodies[self.cycle].arriving = False
        super().on_message_complete()
        if self.cycle.response_complete:  # before the end of the body
            self._await_request()
        else:
            self._deadline = math.inf

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._prepare(cycle)
        is_probe = endpoint_path(cycle.scope) in PROBE_PATHS  # type: ignore[arg-type]
        if not is_probe and self._table.take_place(cycle):
            self._table.mark_busy(self)
            app = self._in_turn(app if cycle.scope["http_version"] != "1.0" else _without_chunks(app, cycle), cycle)
        else:
            self._table.mark_reading(self)
            app = app if is_probe else self._refuse_for_now
        if is_probe and not self._probed and not self.pipeline:
            self._probed = True
            self._run_at_once(cycle.run_asgi(app))
        else:
            super()._start_asgi_task(cycle, app)

    def _run_at_once(self, answering: Coroutine[Any, Any, None]) -> None:
        """Answer a request before this call returns: without a task it takes half as long."""
        if (task := run_eagerly(answering)) is not None:  # it waits until the client reads
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)

    async def _refuse_for_now(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, in place of the app, while as many requests as possible are being answered."""
        error = Overloaded(
            "The server is busy: it is answering as many requests as it may at once (--limit-concurrency).",
            headers={"Retry-After": "1"},
        )
        await error.response(endpoint_path(scope))(scope, receive, send)
        if self._access_log.includes(scope):
            self._access_log.write(scope, error.status)

    def _in_turn(self, app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
        """The app, for a request that has a place. Thousands of requests may arrive together."""

        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await turns().take(ARRIVALS + tenant_of(scope))
                await app(scope, receive, send)
            finally:
                self._table.leave_place(cycle)

        return handle

    def on_response_complete(self) -> None:
        if self._running is not None:
            self._table.leave_place(self._running)  # its task may still have something to do
            self._release_body(self._running)
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if not self.cycle.response_complete:  # a request that was sent ahead is next
            if self._in_body and not self.pipeline:
                self._deadline = self._table.deadline(self._limits.body_timeout)
        elif self._in_head:
            self._await_head()
        else:  # the rest of a body that was not read may still arrive
            self._await_request()

    def resume_writing(self) -> None:
        self._unread.read_at = self._table.clock
        super().resume_writing()

    def overdue(self) -> bool:
        """Return whether a deadline for sending or reading has passed."""
        return self._unread.overdue() or self._table.clock > self._deadline

    def end_overdue(self) -> None:
        """Close the connection, with a response if the client waits for one."""
        late = self._table.clock > self._deadline
        self._deadline = math.inf
        if not late:
            reset(self.transport)
        elif self._refused:
            self.transport.abort()
        elif self._in_body and not self.cycle.response_complete:
            self._refuse(TimedOut("The body of the request did not arrive in time (--body-timeout)."))
        elif self._in_head:
            self._refuse(TimedOut("The headers of the request did not arrive in time (--header-timeout)."))
        else:
            self.transport.close()

    def _await_head(self) -> None:
        self._table.mark_reading(self)
        self._deadline = self._table.deadline(self._limits.header_timeout)

    def _await_request(self) -> None:
        self._table.mark_idle(self)
        self._deadline = self._table.deadline(self._limits.timeout_keep_alive)

    def _prepare(self, cycle: RequestResponseCycle) -> None:
        """Complete what uvicorn has made of a request: its path, and its id, which all responses get."""
        scope: Scope = cycle.scope  # type: ignore[assignment]
        put_below(self._root, scope)
        scope["state"][ARRIVED] = time.monotonic()
        scope["state"]["request_id"] = request_id = request_id_of(scope["headers"])
        cycle.default_headers = [*cycle.default_headers, (REQUEST_ID.encode(), request_id.encode())]

    def _count_body(self, cycle: RequestResponseCycle, size: int) -> None:
        if cycle.response_complete:
            return
        body = self._bodies.get(cycle)
        if body is None:
            scope: Scope = cycle.scope  # type: ignore[assignment]
            body = self._bodies[cycle] = self._table.bodies.begin(scope, self._refuse)
            scope[RELEASE_BODY] = body.release
        self._table.bodies.receive(body, size, new_piece=not cycle.body)

    def _release_body(self, cycle: RequestResponseCycle) -> None:
        if (body := self._bodies.pop(cycle, None)) is not None:
            body.scope.pop(RELEASE_BODY, None)  # a cycle: the body refers to the scope, and to this connection
            body.release()

    def _endpoint(self) -> str:
        """The path of a request whose head may be incomplete."""
        url = self.url if self.scope is not None else b""
        return path_below(self._root, unquote(url.partition(b"?")[0].decode("latin-1")))

    def _headers_too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(
            f"The request has more than {self._limits.max_header_count} headers, or they are larger than "
            f"{self._limits.max_header_size:d} bytes: the limits of this server (--max-header-count, "
            "--max-header-size)."
        )

    def _opens_websocket(self) -> bool:
        """Return whether a request for another protocol gets it. Others are answered as if they had not asked."""
        return (
            self._endpoint() in _WEBSOCKETS
            and self.parser.get_method() == b"GET"
            and self._should_upgrade()
            and len(self._table.running) < self._table.limit
            and [name for name, _ in self.headers].count(b"host") <= 1
            and (self._running is None or self._running.response_complete)
        )

    def _open_websocket(self, frames: bytes) -> None:
        """Hand the connection over to the WebSocket protocol.

        Raises:
            ApiError: the request is not a valid handshake.
        """
        handshake = handshake_of(self.url, self.headers, self.parser.get_http_version())
        self._table.remove(self)
        self.connections.discard(self)
        protocol: BoundedWebSocket = self.ws_protocol_class(  # type: ignore[assignment, call-arg, misc]
            config=self.config, server_state=self.server_state, app_state=self.app_state
        )
        protocol.connection_made(self.transport)
        protocol.open(handshake, request_id_of(self.headers), self._root)
        self.transport.set_protocol(protocol)
        if frames:
            protocol.data_received(frames)

    def _continue_without_upgrade(self, body: bytes) -> None:
        """Parse a request again, without its wish for another protocol, which made the parser skip its body."""
        self._upgrades = False
        version = self.parser.get_http_version().encode()
        head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        head += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
        self.data_received(b"\r\n".join([*head, b"", body]))

    def _refuse(self, error: ApiError) -> None:
        """Respond with an error and close the connection, once the client has had time to read the response.

        While another response is in progress, the connection is closed at once.
        """
        cycle = self._running
        if cycle is not None and not cycle.response_complete:
            if cycle is not self.cycle or not self._in_body or cycle.response_started:
                self.transport.abort()
                return
            self._tell_running_app()
        response = error.response(self._endpoint())
        request_id = self._request_id()
        self._access_log.write_refusal(self.client, error, request_id)
        self.transport.write(self._encoded(response, request_id))
        self._refused = True
        self._table.mark_idle(self)
        self._deadline = self._table.deadline(_SECONDS_TO_READ_A_REFUSAL)
        self.flow.resume_reading()  # closing a socket with unread data would discard the response
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _tell_running_app(self) -> None:
        """Tell the app that its client has gone."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _request_id(self) -> str:
        """The id of a request whose head may be incomplete."""
        of_this_request = self._in_head or self._in_body or self._upgrades
        return request_id_of(self.headers) if of_this_request else new_request_id()

    def _encoded(self, response: Response, request_id: str) -> bytes:
        headers = [
            *self.server_state.default_headers,
            *response.raw_headers,
            (REQUEST_ID.encode(), request_id.encode()),
            (b"connection", b"close"),
        ]
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        return b"".join([STATUS_LINE[response.status_code], lines, b"\r\n", bytes(response.body)])


def _refusal_of(error: httptools.HttpParserError) -> ApiError:
    cause = error.__context__  # the exception of a callback
    if isinstance(cause, ApiError):
        return cause
    return InvalidRequest(f"Invalid HTTP request: {error if cause is None else 'invalid URL'}")
