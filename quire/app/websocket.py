"""Uvicorn's WebSocket protocol with bounds on bytes parsed at once, on fragments, and on times."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request
from websockets.server import ServerProtocol

from quire.api.http.request_head import ARRIVED, REQUEST_ID, endpoint_path, put_below
from quire.api.http.tenant import tenant_of
from quire.app.connections import Connections, UnreadResponse, reset
from quire.protocol.errors import ApiError, Internal, InvalidRequest, TimedOut
from quire.workers.turns import ARRIVALS, ENDINGS, turns

_SLICE = 4 << 10  # bytes that are parsed before others have their turn: hundreds of the smallest frames
_MAX_FRAGMENTS = 1 << 16  # of a message; they may be empty
_ANY_HEAD = b"GET / HTTP/1.1\r\n\r\n"  # what the parser needs to go on to frames; the real one has been parsed
_RESPONSES = ("websocket.accept", "websocket.http.response.start")  # messages that begin the answer to a handshake


class UpgradeRequired(ApiError):
    """A handshake of another version of the protocol."""

    status = HTTPStatus.UPGRADE_REQUIRED
    kind = "BadRequestError"


def handshake_of(url: bytes, headers: Sequence[tuple[bytes, bytes]], version: str) -> Request:
    """The WebSocket handshake that an HTTP request is.

    Raises:
        ApiError: it is not a valid one.
    """
    decoded = Headers([(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers])
    request = Request(url.decode("ascii"), decoded, protocol=f"HTTP/{version}")
    if "transfer-encoding" in decoded or not set(decoded.get_all("content-length")) <= {"0"}:
        raise InvalidRequest("The request for a WebSocket has a body.")
    answer = ServerProtocol().accept(request)
    if answer.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
        error = UpgradeRequired if answer.status_code == HTTPStatus.UPGRADE_REQUIRED else InvalidRequest
        text = bytes(answer.body).decode().partition("\n")[0]
        raise error(text, headers={"Upgrade": "websocket", "Sec-WebSocket-Version": "13"})
    return request


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """One WebSocket connection.

    What has arrived is parsed in slices, and only while the app has taken all messages. So a client neither blocks the
    event loop with small frames nor fills the queue of messages: its connection is not read until the app wants more.
    Until the app has accepted the connection there is a deadline, as for the head of a request.
    """

    def __init__(self, table: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._table = table
        self._unparsed = bytearray()
        self._scheduled = False
        self._flow = ""  # of turns
        self._deadline = math.inf
        self.root_path = ""  # uvicorn would put it before paths that have it already

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._unread = UnreadResponse(self._table, self.transport)
        if self._table.add(self):
            self._deadline = self._table.deadline(self._table.options.header_timeout)
        else:
            self.transport.abort()

    def open(self, handshake: Request, request_id: str, root_path: str) -> None:
        """Begin with a handshake that has been parsed, and which the parser of frames might not accept."""
        self._request_id = request_id
        self._flow = (self.client or ("",))[0]
        self.conn.receive_data(_ANY_HEAD)
        self.conn.events_received()
        if self._table.take_place(self):
            self._table.mark_busy(self)
        self.handle_connect(handshake)
        put_below(root_path, self.scope)  # type: ignore[arg-type]  # uvicorn's type of a scope
        self.scope["state"][ARRIVED] = time.monotonic()
        self.scope["state"]["request_id"] = request_id

    async def run_asgi(self) -> None:
        """Answer the handshake and serve the session. Thousands may arrive together."""
        await turns().take(ARRIVALS + tenant_of(self.scope))  # type: ignore[arg-type]  # uvicorn's type of a scope
        await super().run_asgi()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        self._table.leave_place(self)
        self._table.mark_idle(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        self._unparsed.clear()
        super().connection_lost(exc)

    def overdue(self) -> bool:
        """Return whether the client does not read, or the connection was not accepted in time."""
        return self._unread.overdue() or self._table.clock > self._deadline

    def end_overdue(self) -> None:
        """Close the connection, with a response if none was sent."""
        if self._table.clock <= self._deadline or self.handshake_complete:
            reset(self.transport)
            return
        self._deadline = math.inf
        self._refuse(TimedOut("The WebSocket was not accepted in time (--header-timeout)."))
        self.transport.close()

    def send_500_response(self) -> None:
        """Answer the handshake if the app could not."""
        if self.initial_response is None and not self.handshake_complete:
            self._refuse(Internal("Internal server error"))

    def _refuse(self, error: ApiError) -> None:
        response = error.response(endpoint_path(self.scope))  # type: ignore[arg-type]
        headers = [*self.default_headers, *response.raw_headers, self._id_header(), (b"connection", b"close")]
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(b"".join([STATUS_LINE[response.status_code], lines, b"\r\n", bytes(response.body)]))
        self.handshake_complete = self.close_sent = True

    def _id_header(self) -> tuple[bytes, bytes]:
        return REQUEST_ID.encode(), self._request_id.encode()

    def resume_writing(self) -> None:
        self._unread.read_at = self._table.clock
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        if self._scheduled:
            return
        if self.queue.empty() or self.close_sent:
            self._parse()
        else:
            self._pause()

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= _MAX_FRAGMENTS:
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, "the message has too many fragments")
            self.handle_parser_exception()
            return
        super().handle_cont(event)

    async def receive(self) -> Any:
        """The next message. Once it was the last one, more are parsed."""
        message = await self.queue.get()
        if message["type"] == "websocket.disconnect":
            await turns().take(ENDINGS)  # thousands of clients may leave together
        elif self.queue.empty():
            self._go_on()
        return message

    async def send(self, message: Any) -> None:
        """Send a message. After a close frame, only the answer to it is of interest."""
        if message["type"] in _RESPONSES:
            self._deadline = math.inf
            message = {**message, "headers": [*message.get("headers", ()), self._id_header()]}
        await super().send(message)
        if self.close_sent:
            self.handshake_complete = True  # or refused by a response, of which uvicorn takes no note
            self._go_on()

    def _parse(self) -> None:
        self._scheduled = False
        if self.transport.is_closing():
            self._unparsed.clear()
            return
        piece = bytes(self._unparsed[:_SLICE])
        del self._unparsed[:_SLICE]
        super().data_received(piece)
        if self._unparsed:
            self._pause()
        if self.queue.empty() or self.close_sent:
            self._go_on()

    def _pause(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def _go_on(self) -> None:
        if self._unparsed:
            if not self._scheduled:
                self._scheduled = True
                turns().run(self._flow, self._parse)
        elif self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
