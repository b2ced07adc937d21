"""Transport between the front end and a core: a ZMQ pair of sockets with multipart messages.

A message is a msgpack head, followed by one raw frame for each large array in it; small ones are in the head.
`inproc://`, `ipc://` and `tcp://` addresses share one code path. The front end binds, the core connects.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import msgspec
import numpy as np
import zmq

from quire.engine.client.errors import EngineDead, FrontEndClosed, MalformedMessage
from quire.engine.client.protocol import AddRequests, ClientMessage, CoreMessage, FrontEndLeft, Hello, SharedMessage

logger = logging.getLogger(__name__)

_ARRAY, _SMALL_ARRAY = 1, 2  # msgpack extensions: (frame index, dtype, shape), and (bytes, dtype, shape)
_SMALL = 1 << 12  # bytes, which are copied faster than a frame is sent
Frame = bytes | memoryview
_REFERENCE = msgspec.msgpack.Decoder(tuple[int, str, tuple[int, ...]])
_CONTENT = msgspec.msgpack.Decoder(tuple[bytes, str, tuple[int, ...]])
Message = TypeVar("Message")
Received = TypeVar("Received")


def flush_messages() -> None:
    """Wait until messages of closed channels are sent, for as long as their sockets linger; for a process that ends."""
    zmq.Context.instance().destroy()


class MessageEncoder:
    """Encode a message as frames."""

    def encode(self, message: object) -> list[Frame]:
        """Return the frames of a message: its head, then its arrays in order."""
        arrays: list[Frame] = []

        def encode_array(value: Any) -> msgspec.msgpack.Ext:
            if not isinstance(value, np.ndarray):
                raise NotImplementedError(f"{type(value)} cannot be sent")  # msgspec's convention for unknown types
            if value.nbytes <= _SMALL:
                content = (value.tobytes(), value.dtype.str, value.shape)
                return msgspec.msgpack.Ext(_SMALL_ARRAY, msgspec.msgpack.encode(content))
            arrays.append(np.ascontiguousarray(value).data.cast("B"))
            reference = (len(arrays), value.dtype.str, value.shape)
            return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(reference))

        head = msgspec.msgpack.encode(message, enc_hook=encode_array)
        return [head, *arrays]


class MessageDecoder(Generic[Message]):
    """Decode frames into one of the message types of a union."""

    def __init__(self, messages: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
            messages, ext_hook=self._array, dec_hook=lambda _kind, value: value
        )
        self._frames: Sequence[Frame] = ()

    def decode(self, frames: Sequence[Frame]) -> Message:
        """Return the message in `frames`; its large arrays are views of the frames.

        Raises:
            MalformedMessage: the frames are not a message of the union.
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
        if code == _ARRAY:
            index, dtype, shape = _REFERENCE.decode(data)
            return np.frombuffer(self._frames[index], dtype=np.dtype(dtype)).reshape(shape)
        if code == _SMALL_ARRAY:
            content, dtype, shape = _CONTENT.decode(data)
            return np.frombuffer(content, dtype=np.dtype(dtype)).reshape(shape)
        raise MalformedMessage(f"unknown extension {code}")


class _Channel(Generic[Received]):
    """One end of the pair; a context manager."""

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


def new_socket(kind: int) -> zmq.Socket[bytes]:
    """Return a socket whose queues have no limits, which is neither bound nor connected."""
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    # The front end's limit on requests bounds the queues; a message must never be dropped here.
    made.setsockopt(zmq.SNDHWM, 0)
    made.setsockopt(zmq.RCVHWM, 0)
    return made


class ClientChannel(_Channel[CoreMessage]):
    """The front end's socket, read by callbacks of the event loop instead of a task."""

    def __init__(self, address: str) -> None:
        self._socket = self._open(address)
        self._encoder = MessageEncoder()
        self._decoder: MessageDecoder[CoreMessage] = MessageDecoder(CoreMessage)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: Callable[[CoreMessage], None] = lambda _: None

    def _open(self, address: str) -> zmq.Socket[bytes]:
        opened = new_socket(zmq.PAIR)
        opened.bind(address)
        return opened

    def listen(self, on_message: Callable[[CoreMessage], None]) -> None:
        """Call `on_message` with each message from the core; malformed ones are logged and dropped."""
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._receive_all)
        self._loop.call_soon(self._receive_all)

    def send(self, message: SharedMessage) -> None:
        """Queue a message to the core.

        Raises:
            EngineDead: no core is connected.
        """
        try:
            # The queue is unbounded, so a blocking send would wait only where no core is connected, and forever.
            self._socket.send_multipart(self._encoder.encode(message), flags=zmq.NOBLOCK, copy=True)
        except zmq.Again as error:
            raise EngineDead("The engine is not running.") from error
        finally:
            if self._loop is not None:
                self._loop.call_soon(self._receive_all)  # sending may clear the signal that a message has arrived

    def close(self) -> None:
        """Stop listening and close the socket."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
        super().close()

    def _receive_all(self) -> None:
        """Receive all pending messages. The socket's file descriptor is edge-triggered, so none may be left."""
        while not self._socket.closed and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            try:
                message = self._decoder.decode(self._socket.recv_multipart(zmq.NOBLOCK))
            except MalformedMessage as error:
                logger.error("dropped a malformed message from the engine: %s", error)
                continue
            self._on_message(message)


class CoreChannel(_Channel[ClientMessage]):
    """The core's socket, with blocking calls."""

    def __init__(self, address: str) -> None:
        self._socket = self._open(address)
        self._encoder = MessageEncoder()
        self._decoder: MessageDecoder[SharedMessage] = MessageDecoder(SharedMessage)
        self._unpacked: deque[ClientMessage] = deque()
        self._wakes: tuple[socket.socket, socket.socket] | None = None  # what is written to, and read from

    def _open(self, address: str) -> zmq.Socket[bytes]:
        opened = new_socket(zmq.PAIR)
        opened.connect(address)
        return opened

    def waker(self) -> Callable[[], None]:
        """Return a function that ends a `receive` that waits, or the next one. It may be called from any thread."""
        if self._wakes is None:
            self._wakes = socket.socketpair()
            for end in self._wakes:
                end.setblocking(False)
        written = self._wakes[0]

        def wake() -> None:
            with suppress(OSError):  # as many are waiting to be read as fit, or the channel is closed
                written.send(b"\0")

        return wake

    @property
    def inbox(self) -> int:
        """A file descriptor from which something can be read when a message has arrived since `receive` had none.

        It may tell of no message, or be late: `receive` may have a message nevertheless.
        """
        return int(self._socket.getsockopt(zmq.FD))

    def close(self) -> None:
        """Close the socket; messages not sent within a second are lost."""
        super().close()
        for end in self._wakes or ():
            end.close()

    def send(self, message: CoreMessage) -> None:
        """Queue a message to the front end.

        Raises:
            FrontEndClosed: the front end has closed its socket.
        """
        try:
            # As in `ClientChannel.send`: a blocking send would wait only where the other socket is closed.
            self._socket.send_multipart(self._encoder.encode(message), flags=zmq.NOBLOCK, copy=True)
        except zmq.Again as error:
            raise FrontEndClosed("The front end has closed its socket.") from error

    def receive(self, timeout: float | None) -> ClientMessage | None:
        """Return the front end's next message, or None if none arrives within `timeout` seconds or somebody wakes it.

        Args:
            timeout: in seconds; None waits without a limit.

        Raises:
            MalformedMessage: the received frames are not a message.
        """
        if self._unpacked:
            return self._unpacked.popleft()
        if not self._wait(None if timeout is None else round(timeout * 1000)):
            return None
        self._unpack(self._socket.recv_multipart())
        return self.receive(0.0)

    def receive_arrived(self, *kinds: type[ClientMessage]) -> ClientMessage | None:
        """Return the first message of some kinds that has arrived, or None; the others are left for `receive`."""
        while self._wait(0):
            self._unpack(self._socket.recv_multipart())
        message = next((message for message in self._unpacked if isinstance(message, kinds)), None)
        if message is not None:
            self._unpacked.remove(message)
        return message

    def _unpack(self, frames: list[bytes]) -> None:
        """Take the messages of the client out of frames."""
        match self._decoder.decode(frames):
            case AddRequests(requests=requests):
                self._unpacked.extend(requests)
            case Hello() | FrontEndLeft():
                raise MalformedMessage("this core has one front end")
            case message:
                self._unpacked.append(message)

    def _wait(self, milliseconds: int | None) -> bool:
        """Wait for a message; returns whether there is one."""
        if self._wakes is None or milliseconds == 0:
            return bool(self._socket.poll(milliseconds))
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakes[1], zmq.POLLIN)
        ready = dict(poller.poll(milliseconds))
        with suppress(OSError):  # there is nothing to read
            while self._wakes[1].recv(4096):
                pass
        return self._socket in ready
