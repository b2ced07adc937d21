"""ZMQ pair between the front end and a core: a msgpack head and one raw frame for each array in it.

`inproc://`, `ipc://` and `tcp://` addresses are one code path. The front end binds, the core connects.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import msgspec
import numpy as np
import zmq

from quire.engine.wire.errors import EngineDead, MalformedMessage
from quire.engine.wire.protocol import CoreMessage, FrontMessage

logger = logging.getLogger(__name__)

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

    _socket: zmq.Socket[bytes]

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
    """The front end's end, for an event loop: the loop itself reads the socket, with no task between."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PAIR)
        _unbounded(self._socket)
        self._socket.bind(address)
        self._encoder = Encoder()
        self._decoder: Decoder[CoreMessage] = Decoder(CoreMessage)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: Callable[[CoreMessage], None] = lambda _: None

    def listen(self, on_message: Callable[[CoreMessage], None]) -> None:
        """Call `on_message` with each of the core's messages from now on; what is none is logged and dropped."""
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._take_all)
        self._loop.call_soon(self._take_all)

    def send(self, message: FrontMessage) -> None:
        """Queue a message to the core.

        Raises:
            EngineDead: nobody is at the other end.
        """
        try:
            # The queue has no bound, so only a missing core could make this wait, and for ever.
            self._socket.send_multipart(self._encoder.encode(message), flags=zmq.NOBLOCK, copy=True)
        except zmq.Again as error:
            raise EngineDead("The engine is gone.") from error
        finally:
            if self._loop is not None:
                self._loop.call_soon(self._take_all)  # sending may swallow the sign that something has come

    def close(self) -> None:
        """Stop listening too."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
        super().close()

    def _take_all(self) -> None:
        """The socket tells only once that something has come, so nothing may be left."""
        while not self._socket.closed and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            try:
                message = self._decoder.decode(self._socket.recv_multipart(zmq.NOBLOCK))
            except MalformedMessage as error:
                logger.error("dropped a malformed message from the engine: %s", error)
                continue
            self._on_message(message)


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
