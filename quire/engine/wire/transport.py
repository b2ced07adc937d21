"""ZMQ pair between the front end and a core: a msgpack head and one raw frame for each array in it.

`inproc://`, `ipc://` and `tcp://` addresses are one code path. The front end binds, the core connects.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from quire.engine.wire.errors import EngineDead, MalformedMessage
from quire.engine.wire.protocol import CoreMessage, FrontMessage

_ARRAY = 1  # msgpack extension: (frame index, dtype, shape)
Frame = bytes | memoryview
Message = TypeVar("Message")
Received = TypeVar("Received")


class Encoder:
    """Turns a message into frames."""

    def encode(self, message: object) -> list[Frame]:
        """Frames of a message: its head, then its arrays in order."""
        arrays: list[Frame] = []

        def set_aside(value: Any) -> msgspec.msgpack.Ext:
            if not isinstance(value, np.ndarray):
                raise NotImplementedError(f"{type(value)} cannot be sent")  # msgspec's convention for unknown types
            arrays.append(np.ascontiguousarray(value).data.cast("B"))
            note = (len(arrays), value.dtype.str, value.shape)
            return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(note))

        head = msgspec.msgpack.encode(message, enc_hook=set_aside)
        return [head, *arrays]


class Decoder(Generic[Message]):
    """Turns frames back into one of the messages of a union."""

    def __init__(self, messages: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
            messages, ext_hook=self._array, dec_hook=lambda _kind, value: value
        )
        self._frames: Sequence[Frame] = ()

    def decode(self, frames: Sequence[Frame]) -> Message:
        """The message in `frames`; its arrays are views of them.

        Raises:
            MalformedMessage: the frames hold no such message.
        """
        if not frames:
            raise MalformedMessage("no frames")
        self._frames = frames
        try:
            return self._decoder.decode(frames[0])
        except (msgspec.MsgspecError, ValueError, TypeError, IndexError, UnicodeError) as error:
            raise MalformedMessage(str(error)) from error
        finally:
            self._frames = ()

    def _array(self, code: int, data: memoryview) -> Any:
        if code != _ARRAY:
            raise MalformedMessage(f"unknown extension {code}")
        index, dtype, shape = msgspec.msgpack.decode(data, type=tuple[int, str, tuple[int, ...]])
        return np.frombuffer(self._frames[index], dtype=np.dtype(dtype)).reshape(shape)


class _Channel(Generic[Received]):
    """One end of the pair."""

    _socket: Any  # zmq.Socket, or its asyncio twin

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket; messages not sent within a second are lost."""
        self._socket.close(linger=1000)


def _unbounded(socket: zmq.Socket[Any]) -> None:
    # Queues are bounded by the front end's limit on requests, never by dropping a message here.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


class FrontChannel(_Channel[CoreMessage]):
    """The front end's end, for an event loop."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.asyncio.Context.shadow(zmq.Context.instance()).socket(zmq.PAIR)
        _unbounded(self._socket)
        self._socket.bind(address)
        self._encoder = Encoder()
        self._decoder: Decoder[CoreMessage] = Decoder(CoreMessage)

    async def send(self, message: FrontMessage) -> None:
        """Queue a message to the core.

        Raises:
            EngineDead: nobody is at the other end.
        """
        try:
            # The queue has no bound, so only a missing core could make this wait, and for ever.
            await self._socket.send_multipart(self._encoder.encode(message), flags=zmq.NOBLOCK, copy=True)
        except zmq.Again as error:
            raise EngineDead("The engine is gone.") from error

    async def receive(self) -> CoreMessage:
        """The core's next message.

        Raises:
            MalformedMessage: what came is none.
        """
        return self._decoder.decode(await self._socket.recv_multipart())


class CoreChannel(_Channel[FrontMessage]):
    """The core's end, blocking."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PAIR)
        _unbounded(self._socket)
        self._socket.connect(address)
        self._encoder = Encoder()
        self._decoder: Decoder[FrontMessage] = Decoder(FrontMessage)

    def send(self, message: CoreMessage) -> None:
        """Queue a message to the front end."""
        self._socket.send_multipart(self._encoder.encode(message), copy=True)

    def receive(self, timeout: float | None) -> FrontMessage | None:
        """The front end's next message, or none within `timeout` seconds; without one, wait for it.

        Raises:
            MalformedMessage: what came is none.
        """
        if not self._socket.poll(None if timeout is None else round(timeout * 1000)):
            return None
        return self._decoder.decode(self._socket.recv_multipart())
