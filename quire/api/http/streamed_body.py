"""Bodies that are encoded while they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.api.http.sse import run_until_disconnect
from quire.workers.tenant import take_turn

_AT_ONCE = 1 << 17  # bytes that are encoded before the event loop turns to others: about 1 ms


def response_of(
    pieces: Iterable[bytes], media_type: str = "application/json", headers: Mapping[str, str] | None = None
) -> Response:
    """A response whose body is the concatenated pieces. A large body is encoded while the client reads it.

    Args:
        pieces: parts of the body of at most some hundred kilobytes; an iterator is used up while the body is sent.
        media_type: media type of the body.
        headers: headers of the response.
    """
    left = iter(pieces)
    start = _some(left)
    if len(start) < _AT_ONCE:
        return Response(start, headers=headers, media_type=media_type)
    return _Pieces(start, left, media_type, headers)


class _Pieces(Response):
    def __init__(self, start: bytes, left: Iterator[bytes], media_type: str, headers: Mapping[str, str] | None) -> None:
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._start = start
        self._left = left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the body. Encoding waits for the client, and ends when it disconnects."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await run_until_disconnect(asyncio.ensure_future(self._send(send)), receive)

    async def _send(self, send: Send) -> None:
        data = self._start
        await take_turn()
        while data:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            await take_turn()
            data = _some(self._left)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _some(pieces: Iterator[bytes]) -> bytes:
    """The next pieces, enough for one turn; nothing at their end."""
    gathered: list[bytes] = []
    size = 0
    for piece in pieces:
        gathered.append(piece)
        size += len(piece)
        if size >= _AT_ONCE:
            break
    return b"".join(gathered)
