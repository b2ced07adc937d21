"""Uvicorn's WebSocket protocol with bounds on bytes parsed at once, on fragments, and on the time to read events."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

from quire.app.connections import Connections, UnreadResponse, reset

_SLICE = 4 << 10  # bytes that are parsed before others have their turn: hundreds of the smallest frames
_MAX_FRAGMENTS = 1 << 16  # of a message; they may be empty


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """One WebSocket connection.

    What has arrived is parsed in slices, and only while the app has taken all messages. So a client neither blocks the
    event loop with small frames nor fills the queue of messages: its connection is not read until the app wants more.
    """

    def __init__(self, table: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._table = table
        self._unparsed = bytearray()
        self._scheduled = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._unread = UnreadResponse(self._table, self.transport)
        if self._table.add(self):
            self._table.mark_busy(self)
        else:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        self._unparsed.clear()
        super().connection_lost(exc)

    def check(self) -> None:
        """Close the connection if its client does not read."""
        if self._unread.overdue():
            reset(self.transport)

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
        if self.queue.empty():
            self._go_on()
        return message

    async def send(self, message: Any) -> None:
        """Send a message. After a close frame, only the answer to it is of interest."""
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
                self.loop.call_soon(self._parse)
        elif self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
