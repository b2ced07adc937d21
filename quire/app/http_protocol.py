"""Uvicorn's HTTP protocol with bounds on the size of requests, and on the time to send them and read responses."""

from __future__ import annotations

import asyncio
import math
import socket
from typing import Any

import httptools
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from quire.api.http.errors import ApiError, HeadersTooLarge, InvalidRequest, Overloaded, TimedOut, UrlTooLong
from quire.app.connections import Connections, UnreadResponse, reset
from quire.app.middleware import PROBE_PATHS

_MAX_PIPELINED = 64  # requests that a client may send ahead of their responses
_BYTES_PER_SECOND = 1024  # slowest accepted body
_SECONDS_TO_READ_A_REFUSAL = 2.0
_UNSENT = 64 << 10  # bytes of a response in the system's send buffer that are not yet on the network
_WEBSOCKETS = (b"/v1/realtime",)
_PROBES = frozenset(path.encode() for path in PROBE_PATHS)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. What it may do and for how long is documented in docs/api/errors-and-limits.md.

    At any time a connection waits for one of these, until `_deadline`: a request head, the rest of a body, the next
    request, or that the client has read a refusal. While a request is being answered there is no deadline.
    """

    def __init__(self, table: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._table = table
        self._limits = table.options
        self._served_app = self.app
        self._deadline = math.inf
        self._in_head = self._in_body = False
        self._upgrades = self._refused = False
        self._max_header_count, self._max_header_size = self._limits.max_header_count, int(self._limits.max_header_size)
        self._max_uncounted = self._max_header_size + int(self._limits.max_url_size)
        self._header_count = self._header_size = 0
        self._uncounted = 0  # bytes of an incomplete header or chunk header
        self._running: RequestResponseCycle | None = None  # the request that is being answered

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
        self._tell_running_app()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        self._uncounted += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
            if self._opens_websocket():
                self._open_websocket(rest)
            else:
                self._continue_without_upgrade(rest)
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
        has_room = len(self.tasks) < self._table.limit or self.url.partition(b"?")[0] in _PROBES
        self.app = self._served_app if has_room else _refuse_for_now
        super().on_headers_complete()
        self._in_head, self._in_body = False, True
        self._table.mark_busy(self)
        self._deadline = math.inf if self.pipeline else self._table.deadline(self._limits.body_timeout)

    def on_body(self, body: bytes) -> None:
        self._uncounted = 0
        if self._deadline != math.inf:
            latest = self._table.deadline(self._limits.body_timeout)
            self._deadline = min(self._deadline + len(body) / _BYTES_PER_SECOND, latest)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrades:
            return
        self._in_body = False
        super().on_message_complete()
        if self.cycle.response_complete:  # before the end of the body
            self._await_request()
        else:
            self._deadline = math.inf

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
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

    def check(self) -> None:
        """Close the connection if a deadline for sending or reading has passed."""
        if self._unread.overdue():
            reset(self.transport)
        elif self._table.clock > self._deadline:
            self._deadline = math.inf
            self._end_wait()

    def _end_wait(self) -> None:
        if self._refused:
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

    def _headers_too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(
            f"The request has more than {self._limits.max_header_count} headers, or they are larger than "
            f"{self._limits.max_header_size:d} bytes: the limits of this server (--max-header-count, "
            "--max-header-size)."
        )

    def _opens_websocket(self) -> bool:
        """Whether a request for another protocol gets it. Others are answered as if they had not asked."""
        return (
            self.url.partition(b"?")[0] in _WEBSOCKETS
            and self.parser.get_method() == b"GET"
            and self._should_upgrade()
            and len(self.tasks) < self._table.limit
            and [name for name, _ in self.headers].count(b"host") <= 1
            and (self._running is None or self._running.response_complete)
        )

    def _open_websocket(self, rest: bytes) -> None:
        """Hand the connection over to the WebSocket protocol."""
        assert self.scope is not None
        self.scope["method"] = "GET"
        self._table.remove(self)
        self.handle_websocket_upgrade()
        if rest:
            self.transport.get_protocol().data_received(rest)  # type: ignore[attr-defined]  # BoundedWebSocket

    def _continue_without_upgrade(self, rest: bytes) -> None:
        """Parse a request again, without its wish for another protocol, which made the parser skip its body."""
        self._upgrades = False
        version = self.parser.get_http_version().encode()
        head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        head += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
        self.data_received(b"\r\n".join([*head, b"", rest]))

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
        response = error.response(self.url.decode("latin-1") if self.scope is not None else "")
        if self.access_log:
            host, port = self.client or ("", 0)
            self.access_logger.info("%s:%d - %d %s", host, port, error.status, error)
        self.transport.write(self._encoded(response))
        self._refused = True
        self._table.mark_idle(self)
        self._deadline = self._table.deadline(_SECONDS_TO_READ_A_REFUSAL)
        self.flow.resume_reading()  # closing a socket with unread data would discard the response
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _tell_running_app(self) -> None:
        """Tell the app that its client has gone. Uvicorn tells only the app of the newest request."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _encoded(self, response: Response) -> bytes:
        headers = [*self.server_state.default_headers, *response.raw_headers, (b"connection", b"close")]
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        return b"".join([STATUS_LINE[response.status_code], lines, b"\r\n", bytes(response.body)])


def _refusal_of(error: httptools.HttpParserError) -> ApiError:
    cause = error.__context__  # the exception of a callback
    if isinstance(cause, ApiError):
        return cause
    return InvalidRequest(f"Invalid HTTP request: {error if cause is None else 'invalid URL'}")


async def _refuse_for_now(scope: Scope, receive: Receive, send: Send) -> None:
    """Stands in for the app while as many requests as possible are being answered."""
    error = Overloaded(
        "The server is busy: it is answering as many requests as it may at once (--limit-concurrency).",
        headers={"Retry-After": "1"},
    )
    await error.response(scope["path"])(scope, receive, send)
