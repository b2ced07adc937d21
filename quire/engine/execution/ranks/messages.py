"""Messages between the core, which is rank 0, and the workers, which are the other ranks."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import msgspec

from quire.engine.client.errors import MalformedMessage
from quire.engine.client.protocol import StartProfile, StopProfile, UpdateWeights
from quire.engine.client.transport import MessageDecoder, MessageEncoder
from quire.engine.scheduling.plan import SampledTokens, StepPlan


class Connect(msgspec.Struct, frozen=True, tag=True):
    """All ranks have loaded their parts of the model: connect to each other."""


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Allocate the KV cache, the slots of states, see `SlotCounts`, and places for their snapshots."""

    num_blocks: int
    context_len: int
    sequences: int
    spare_slots: int
    snapshots: int = 0


class RunStep(msgspec.Struct, frozen=True, tag=True):
    """Run a step. `sampled`: the tokens that earlier steps have yielded since the last message."""

    plan: StepPlan
    sampled: list[SampledTokens]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The worker has loaded its part of the model.

    Attributes:
        weight_bytes: of the part.
        dtype: in which the rank runs the model.
    """

    weight_bytes: int
    dtype: str


class Counted(msgspec.Struct, frozen=True, tag=True):
    """What the worker has memory for: KV blocks, and slots of states, see `SlotCounts`.

    Attributes:
        block_bytes: bytes of a block on this rank; 0: its layers have none.
        slot_bytes: bytes of a slot.
    """

    num_blocks: int
    block_bytes: int
    sequences: int
    spare_slots: int
    slot_bytes: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker is ready for steps."""


class CommandEnded(msgspec.Struct, frozen=True, tag=True):
    """The worker has run a command. `error`: why it could not; None if it could."""

    error: str | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The worker ends because of an error."""

    error: str


Message = TypeVar("Message", bound=msgspec.Struct)
_MAX_STEP = 4 << 30  # bytes; a step has prompts and pixels of pictures
MAX_REPLY = 1 << 20  # bytes of what a worker sends
RankCommand = UpdateWeights | StartProfile | StopProfile
ToWorker = Connect | Allocate | RunStep | RankCommand | Stop
FromWorker = Loaded | Counted | Ready | CommandEnded | Failed


class RankChannel:
    """One end of the connection between the core and a worker."""

    def __init__(self, connection: Connection, received: Any, max_bytes: int = _MAX_STEP) -> None:
        """A channel.

        Args:
            connection: this end of a pipe or of a TCP connection.
            received: the union of the messages that arrive at this end.
            max_bytes: of a message that arrives; a longer one is an OSError.
        """
        self.connection = connection
        self._max_bytes = max_bytes
        self._decoder: MessageDecoder[Any] = MessageDecoder(received)

    def receive(self) -> Any:
        """Wait for a message.

        Raises:
            EOFError: the other end is closed, or tells this one to end.
            OSError: the other end is closed, or the message is too long.
            MalformedMessage: what arrived is no message.
        """
        left = self._max_bytes
        frames = [self.connection.recv_bytes(left)]
        while frames[-1]:
            left -= len(frames[-1])
            frames.append(self.connection.recv_bytes(left))
        message = self._decoder.decode(frames[:-1])
        if isinstance(message, Stop):
            raise EOFError
        return message

    def receive_one(self, kind: type[Message]) -> Message:
        """Wait for a message of a kind.

        Raises:
            MalformedMessage: another message arrived. Other errors: see `receive`.
        """
        message = self.receive()
        if not isinstance(message, kind):
            raise MalformedMessage(f"{type(message).__name__} arrived in place of {kind.__name__}")
        return message

    def send(self, message: msgspec.Struct) -> None:
        """Send a message.

        Raises:
            OSError: the other end is closed.
        """
        send_frames([self.connection], message)

    def close(self) -> None:
        """Close this end."""
        self.connection.close()


def send_frames(connections: list[Connection], message: msgspec.Struct) -> None:
    """Encode a message once, and send it to several.

    Raises:
        OSError: another end is closed.
    """
    frames = MessageEncoder().encode(message)
    for connection in connections:
        for frame in frames:
            connection.send_bytes(frame)
        connection.send_bytes(b"")  # the end of the message


class ReceivedSteps:
    """What a worker has to run, received in a thread, so that the core never waits for a worker to read."""

    def __init__(self, channel: RankChannel) -> None:
        """`channel`: nothing else receives from it any more."""
        self._channel = channel
        self._received: SimpleQueue[RunStep | RankCommand | Exception] = SimpleQueue()
        threading.Thread(target=self._receive, name="quire-plans", daemon=True).start()

    def next(self, seconds: float | None) -> RunStep | RankCommand | None:
        """Wait for the next step or command, at most so long; None if there is none yet.

        Raises:
            EOFError: there will be none any more.
            OSError: like it.
            MalformedMessage: something else arrived.
        """
        try:
            received = self._received.get(timeout=seconds)
        except Empty:
            return None
        if isinstance(received, Exception):
            raise received
        return received

    def _receive(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                if not isinstance(message, RunStep | RankCommand):
                    raise MalformedMessage(f"{type(message).__name__} arrived in place of a step or a command")
                self._received.put(message)
        except (EOFError, OSError, MalformedMessage) as error:
            self._received.put(error)
