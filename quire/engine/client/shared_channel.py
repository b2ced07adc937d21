"""Transport between one core and several front ends, which are processes of a server (--api-server-count).

The core binds, the front ends connect, each with an identity of its number and its generation: `0.1` is the first
process of front end 0, and `0.2` the one that is started in its place. The core itself sees one client: here its
outputs are divided, and what one front end makes of the engine is told to the others.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import zmq
from typing_extensions import override

from quire.engine.client.protocol import (
    Abort,
    AddRequest,
    AddRequests,
    ClientMessage,
    Command,
    CommandDone,
    CoreDied,
    CoreMessage,
    EngineState,
    ErrorOutput,
    ExtendRequest,
    FrontEndLeft,
    Hello,
    Pause,
    Ping,
    Pong,
    Ready,
    RequestOutput,
    Resume,
    RunCommand,
    Shutdown,
    Sleep,
    SleepLevel,
    SleepState,
    StepOutput,
    StepStats,
    TokensOutput,
    UpdateWeights,
    Wake,
    gauges_of,
)
from quire.engine.client.transport import ClientChannel, CoreChannel, new_socket

logger = logging.getLogger(__name__)
PARENT = "parent"  # identity of the process that has started the core, and ends it
_RECONNECT = 10  # milliseconds; front ends connect before the core has bound its socket


def identity_of(index: int, generation: int) -> str:
    """Return the identity of a front end: its number, and how many processes it has had with this one."""
    return f"{index}.{generation}"


class FrontEndChannel(ClientChannel):
    """The socket of one of several front ends."""

    def __init__(self, address: str, identity: str) -> None:
        """Connect, and tell the core. `identity`: see `identity_of`, or `PARENT`."""
        self._identity = identity
        super().__init__(address)
        if identity != PARENT:
            self.send(Hello())

    @override
    def _open(self, address: str) -> zmq.Socket[bytes]:
        opened = new_socket(zmq.DEALER)
        opened.setsockopt_string(zmq.IDENTITY, self._identity)
        opened.setsockopt(zmq.RECONNECT_IVL, _RECONNECT)
        opened.connect(address)
        return opened

    def send_last(self) -> None:
        """End the core, as the process that has started it, and close the socket."""
        self.send(Shutdown())
        self.close()


class _SentCommand(NamedTuple):
    """A command that the core has not answered.

    Attributes:
        identity: of the front end that has sent it.
        serial: that it has there.
        was_paused: the engine was to stay paused when it came.
    """

    identity: bytes
    serial: int
    command: Command
    was_paused: bool


class SharedCoreChannel(CoreChannel):
    """The core's socket, if several front ends share the core."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._front_ends: dict[bytes, None] = {}  # that are there, in the order of their coming
        self._left: set[bytes] = set()  # whose messages may still arrive
        self._owners: dict[str, bytes] = {}  # front ends, by the ids of their requests
        self._pinging: deque[bytes] = deque()  # front ends, in the order of their pings
        self._changing: deque[tuple[bytes, SleepLevel | None]] = deque()  # who has sent `Sleep` or `Wake`
        self._commands: dict[int, _SentCommand] = {}
        self._temporary: set[bytes] = set()  # front ends that will end their pauses themselves
        self._stays_paused = False  # until a front end sends `Resume`
        self._serial = 0
        self._ready: Ready | None = None
        self._stats = StepStats()
        self._state = EngineState()

    @override
    def _open(self, address: str) -> zmq.Socket[bytes]:
        opened = new_socket(zmq.ROUTER)
        opened.bind(address)
        return opened

    @override
    def _unpack(self, frames: list[bytes]) -> None:
        identity, *message = frames
        if identity not in self._left:
            self._take(identity, self._decoder.decode(message))

    def _take(self, identity: bytes, message: ClientMessage | AddRequests | Hello | FrontEndLeft) -> None:
        """Take a message of a front end."""
        match message:
            case Hello():
                self._welcome(identity)
            case FrontEndLeft(identity=left):
                self._forget(left.encode())
            case Shutdown():
                if identity == PARENT.encode():
                    self._unpacked.append(message)
                else:
                    self._forget(identity)
            case AddRequests(requests=requests):
                for request in requests:
                    self._add(identity, request)
            case AddRequest():
                self._add(identity, message)
            case ExtendRequest(request_id=request_id):
                if self._owners.get(request_id) == identity:
                    self._unpacked.append(message)
            case Abort(request_ids=ids):
                self._abort(request_id for request_id in ids if self._owners.get(request_id) == identity)
            case Ping():
                self._pinging.append(identity)
                self._unpacked.append(message)
            case Sleep(level=level):
                self._changing.append((identity, level))
                self._unpacked.append(message)
            case Wake():
                self._changing.append((identity, None))
                self._unpacked.append(message)
            case RunCommand(serial=serial, command=command):
                self._run(identity, serial, command)

    @override
    def send(self, message: CoreMessage) -> None:
        """Queue a message to the front ends that it concerns. What is for one that has ended is dropped."""
        match message:
            case StepOutput(outputs=outputs, stats=stats):
                self._divide(outputs, stats)
            case Pong():
                identity = self._pinging.popleft()
                self._send(identity, message)
                self._send(identity, StepOutput([], gauges_of(self._stats)))  # it may have had no output for long
            case SleepState():
                self._answer_change(message)
            case CommandDone(serial=serial):
                if (sent := self._commands.pop(serial, None)) is not None:
                    self._answer_command(sent, message)
            case Ready():
                self._ready = message
                self._send_to_all(message)
            case CoreDied() | EngineState():
                self._send_to_all(message)

    def _welcome(self, identity: bytes) -> None:
        """Take in a front end, in place of one with the same number, and tell it what the others know."""
        number = identity.partition(b".")[0]
        for replaced in [known for known in self._front_ends if known.partition(b".")[0] == number]:
            self._forget(replaced)
        self._front_ends[identity] = None
        self._send(identity, self._state)
        if self._ready is not None:
            self._send(identity, self._ready)
            self._send(identity, StepOutput([], gauges_of(self._stats)))

    def _forget(self, identity: bytes) -> None:
        """Abort the requests of a front end that has ended, and give up the pauses that it waits for, or would end."""
        if identity in self._left:
            return
        self._left.add(identity)
        self._front_ends.pop(identity, None)
        self._abort([request_id for request_id, owner in self._owners.items() if owner == identity])
        for serial, sent in list(self._commands.items()):
            if sent.identity == identity and not isinstance(sent.command, UpdateWeights):  # which is done all the same
                del self._commands[serial]
                if isinstance(sent.command, Pause) and sent.command.drain and not sent.command.is_temporary:
                    self._run(identity, serial, Pause() if sent.was_paused else Resume())
        if identity in self._temporary:
            self._temporary.remove(identity)
            if not self._temporary:
                self._run(identity, 0, Pause() if self._stays_paused else Resume())

    def _add(self, identity: bytes, request: AddRequest) -> None:
        if request.request_id in self._owners:
            error = ErrorOutput(request.request_id, f"request id {request.request_id} is in use", invalid=True)
            self._send(identity, StepOutput([error], gauges_of(self._stats)))
            return
        self._owners[request.request_id] = identity
        self._unpacked.append(request)

    def _abort(self, request_ids: Iterable[str]) -> None:
        if ids := list(request_ids):
            for request_id in ids:
                self._owners.pop(request_id, None)
            self._unpacked.append(Abort(ids))

    def _run(self, identity: bytes, serial: int, command: Command) -> None:
        self._serial += 1
        self._commands[self._serial] = _SentCommand(identity, serial, command, self._stays_paused)
        if isinstance(command, Pause) and command.is_temporary:
            self._temporary.add(identity)
        elif isinstance(command, Pause | Resume):
            self._temporary.discard(identity)
            self._stays_paused = isinstance(command, Pause)
        self._unpacked.append(RunCommand(self._serial, command))
        if isinstance(command, Pause | Resume):
            self._set_state(identity, msgspec.structs.replace(self._state, is_paused=isinstance(command, Pause)))

    def _answer_command(self, sent: _SentCommand, answer: CommandDone) -> None:
        self._send(sent.identity, msgspec.structs.replace(answer, serial=sent.serial))
        if isinstance(sent.command, UpdateWeights) and answer.error is None:
            self._set_state(sent.identity, msgspec.structs.replace(self._state, weights=sent.command.folder))

    def _answer_change(self, answer: SleepState) -> None:
        identity, level = self._changing.popleft()
        self._send(identity, answer)
        if level is None or answer.error is not None:
            level = self._state.level
        elif self._state.asleep and self._state.level == 2:
            level = 2
        self._set_state(identity, msgspec.structs.replace(self._state, asleep=answer.asleep, level=level))

    def _set_state(self, identity: bytes, state: EngineState) -> None:
        """Note what a front end has made of the engine, and tell the others."""
        self._state = state
        for other in self._front_ends:
            if other != identity:
                self._send(other, state)

    def _divide(self, outputs: Iterable[RequestOutput], stats: StepStats) -> None:
        """Send each front end its outputs. One of them, to which most of a step belongs, gets what the step counts."""
        self._stats = stats
        divided: dict[bytes, list[RequestOutput]] = {}
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is None:
                continue  # its front end has aborted it, or has ended
            divided.setdefault(owner, []).append(output)
            if not isinstance(output, TokensOutput) or output.finish_reason is not None:
                del self._owners[output.request_id]
        gauges = None
        if not divided:  # nobody would learn the gauges of an engine that has become idle
            divided = {identity: [] for identity in self._front_ends}
        for identity in sorted(divided, key=lambda identity: -len(divided[identity])):
            self._send(identity, StepOutput(divided[identity], stats if gauges is None else gauges))
            gauges = gauges or gauges_of(stats)

    def _send_to_all(self, message: CoreMessage) -> None:
        for identity in self._front_ends:
            self._send(identity, message)

    def _send(self, identity: bytes, message: CoreMessage) -> None:
        self._socket.send_multipart([identity, *self._encoder.encode(message)], flags=zmq.NOBLOCK, copy=True)
