"""Client side of one engine: sends requests and returns streams of deltas."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NoReturn

from tokenizers import Tokenizer
from typing_extensions import override

from quire.engine.client.batch import BatchItem, OnResult, PooledBatch, open_batch
from quire.engine.client.commands import Commands, CommandSender
from quire.engine.client.deadline import Deadline
from quire.engine.client.detokenizer import Detokenizer
from quire.engine.client.engine import NO_DEADLINE
from quire.engine.client.errors import EngineDead, EngineError, RequestFailed
from quire.engine.client.model_info import KVEventSource, ModelInfo
from quire.engine.client.origin import check_rank, current_origin
from quire.engine.client.protocol import (
    Abort,
    AddRequests,
    CommandDone,
    CoreDied,
    CoreMessage,
    EngineState,
    ErrorOutput,
    ExtendRequest,
    FrontEndLeft,
    MediaItem,
    MemoryTag,
    Ping,
    Pong,
    Ready,
    RequestOutput,
    RunCommand,
    Shutdown,
    Sleep,
    SleepLevel,
    SleepState,
    StepOutput,
    StepStats,
    TokenArray,
    TokensOutput,
    Wake,
)
from quire.engine.client.records import Observers
from quire.engine.client.request_log import RequestLog
from quire.engine.client.siblings import NoSiblings, Notice, Siblings
from quire.engine.client.sleep import SleepControl, Sleeping
from quire.engine.client.slots import Slots, SlottedEngine
from quire.engine.client.stream import (
    Delta,
    GenerateRequest,
    OutputStream,
    Pooled,
    PooledStream,
    PoolRequest,
    SequenceStream,
    core_request,
)
from quire.engine.client.transport import ClientChannel
from quire.workers.turns import ENDINGS, turns

logger = logging.getLogger(__name__)
_PING_EVERY = 1.0  # seconds


class EngineClient(SlottedEngine):
    """The client of one core: sends it requests and passes its outputs to their streams. Belongs to one event loop."""

    def __init__(self, channel: ClientChannel, tokenizer: Tokenizer, slots: Slots, rank: int = 0) -> None:
        """`slots`: of its sequences, and of those of the model's other replicas. `rank`: that requests may ask for."""
        self.observers = Observers()
        self.request_log: RequestLog | None = None
        self.siblings: Siblings = NoSiblings()
        self.on_state: Callable[[EngineState], None] = lambda _: None
        self._slots = slots
        self._rank = rank
        self._channel = channel
        self._tokenizer = tokenizer
        self._streams: dict[str, OutputStream] = {}
        self._stats = StepStats()
        self._dead: EngineDead | None = None
        self._ended = asyncio.Event()
        self._ready: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        self._heartbeat = _Heartbeat()
        self._pinging = asyncio.create_task(self._ping())
        self._closed = False
        self._sleep_control = SleepControl(self)
        self.sleeping: Sleeping = self._sleep_control
        self._command_sender = CommandSender(self)
        self.commands: Commands = self._command_sender
        channel.listen(self._receive)

    async def ready(self) -> ModelInfo:
        """Wait until the model is loaded.

        Raises:
            EngineDead: loading failed.
        """
        return await asyncio.shield(self._ready)

    @property
    @override
    def kv_event_sources(self) -> dict[int, KVEventSource]:
        if self._dead is not None or not self._ready.done() or self._ready.cancelled() or self._ready.exception():
            return {}
        source = self._ready.result().kv_events
        return {} if source is None else {self._rank: source}

    @property
    @override
    def stats(self) -> StepStats:
        return self._stats

    @property
    @override
    def open_streams(self) -> int:
        return len(self._streams)

    @property
    def is_idle(self) -> bool:
        """Whether no sequence runs, waits or is being prepared."""
        return not self.slots_in_use and not self._streams

    @property
    @override
    def dead(self) -> EngineDead | None:
        return self._dead

    @property
    def refusal(self) -> EngineError | None:
        """The error of requests; None if the engine takes them."""
        return self._dead or self._sleep_control.refusal

    @property
    def refusal_of_new(self) -> EngineError | None:
        """The error of requests that begin now; those that have begun may still end."""
        return self._dead or self._sleep_control.refusal_of_new

    @override
    async def wait_until_dead(self) -> NoReturn:
        await self._ended.wait()
        assert self._dead is not None
        raise self._dead

    async def reconnect(self, channel: ClientChannel) -> None:
        """Replace a core that has died by another one, which is being loaded. Requests fail until it is ready."""
        await self._stop_pinging()
        self._channel.close()
        self._channel, self._stats = channel, StepStats()
        self._heartbeat.answered()
        self._ready = asyncio.get_running_loop().create_future()
        self._pinging = asyncio.create_task(self._ping())
        channel.listen(self._receive)

    def announce_restart(self, text: str) -> None:
        """Set the error of requests while the dead engine is being restarted."""
        if not self._closed:
            self._dead = EngineDead(text)

    @override
    def unresponsive_seconds(self) -> float:
        return self._heartbeat.unresponsive_seconds()

    @override
    @contextmanager
    def slots(self, count: int, tenant: str = "") -> Iterator[None]:
        _raise(self.refusal_of_new)
        check_rank(current_origin(), range(self._rank, self._rank + 1))
        with self._slots.held(count, tenant, self._stats, self.observers):
            yield

    @override
    async def generate(
        self, request: GenerateRequest, ended: Callable[[], None] | None = None
    ) -> AsyncGenerator[Delta, None]:
        detokenizer = Detokenizer(self._tokenizer, request.prompt, request.text)
        stream = SequenceStream(request, detokenizer, ended)
        with self._open(stream, request):
            while True:
                delta = await stream.next()
                yield delta
                if delta.finish_reason is not None:
                    return

    @override
    def extend(
        self, request_id: str, tokens: TokenArray, *, last: bool = False, items: tuple[MediaItem, ...] = ()
    ) -> None:
        if self._dead is not None:
            raise self._dead
        self._channel.send(ExtendRequest(request_id, tokens, last, items))

    @override
    async def pool(self, request: PoolRequest) -> Pooled:
        stream = PooledStream(request)
        with self._open(stream, request):
            return await stream.result()

    @override
    @contextmanager
    def pool_batch(
        self, *, deadline: Deadline = NO_DEADLINE, on_result: OnResult | None = None, tenant: str = ""
    ) -> Iterator[PooledBatch]:
        _raise(self.refusal)
        with open_batch(self, deadline, on_result, tenant) as batch:
            yield batch

    def start(self, items: Sequence[BatchItem]) -> None:
        """Send the requests of a batch; see `BatchClient`."""
        _raise(self.refusal)
        self._streams.update((item.request_id, item) for item in items)
        if self.request_log is not None:
            for item in items:
                self.request_log.begin(item.request_id, item.request, item)
        self._channel.send(AddRequests([core_request(item.request_id, item.request) for item in items]))

    def finish(self, item: BatchItem) -> None:
        """Forget a request of a batch; see `BatchClient`."""
        del self._streams[item.request_id]
        self._record(item.request_id, item)

    def abort(self, items: Sequence[BatchItem]) -> None:
        """Abort requests of a batch; see `BatchClient`."""
        for item in items:
            self._streams.pop(item.request_id, None)
            self._record(item.request_id, item)
        left = [item.request_id for item in items if not item.finished_by_core]
        if left and self._dead is None:
            with suppress(EngineDead):
                self._channel.send(Abort(left))

    @contextmanager
    def _open(self, stream: OutputStream, request: GenerateRequest | PoolRequest) -> Iterator[None]:
        """Send a request to the core and register its stream; on exit, abort it if the core has not finished it."""
        _raise(self.refusal)
        request.deadline.check()
        request_id = (request.request_id if isinstance(request, GenerateRequest) else None) or uuid.uuid4().hex
        self._streams[request_id] = stream
        if self.request_log is not None:
            self.request_log.begin(request_id, request, stream)
        stop_alarm = request.deadline.call(partial(self._fail_in_turn, {request_id: stream}))
        try:
            self._channel.send(core_request(request_id, request))
            yield
        finally:
            stop_alarm()
            del self._streams[request_id]
            self._record(request_id, stream)
            self._end_in_core({request_id: stream})

    def _record(self, request_id: str, stream: OutputStream) -> None:
        stream.times.sent = time.monotonic()
        record = stream.record(request_id)
        record.add_to_timeline()
        if self.request_log is not None:
            self.request_log.end(record, stream)
        self.observers.on_finish(record)

    def end_all(self, error: EngineError) -> None:
        """Abort all requests with an error."""
        streams = dict(self._streams)
        self._end_in_core(streams)
        self._fail_in_turn(streams, error)

    async def heed(self, notice: Notice) -> None:
        """Do what another front end of the engine says, and wait until the core has got what that means for it."""
        match notice:
            case "falls_asleep" | "asleep" | "stays_awake":
                self._sleep_control.heed(notice)
            case "paused" | "updated":
                self._command_sender.heed(notice)
        if self._dead is None:
            with suppress(EngineDead):
                await self._command_sender.flush()

    def forget_front_end(self, identity: str) -> None:
        """Let the core abort the requests of another front end, which has ended; it may have begun a sleep."""
        self._sleep_control.heed("stays_awake")
        if self._dead is None:
            with suppress(EngineDead):
                self._channel.send(FrontEndLeft(identity))

    def on_sleep(self, asleep: frozenset[MemoryTag], level: SleepLevel) -> None:
        """Take note of what has no memory now; `level`: of the last sleep."""
        self.observers.on_sleep(asleep, level)

    def send_control(self, message: Sleep | Wake | RunCommand) -> None:
        """Send a message; raises EngineDead if the engine has stopped."""
        _raise(self._dead)
        self._channel.send(message)

    def _end_if_finished(self, request_id: str, stream: OutputStream) -> None:
        if stream.finish_reason is not None:
            self._end_in_core({request_id: stream})

    def _end_in_core(self, streams: Mapping[str, OutputStream]) -> None:
        """Make the core forget requests, whether or not their output has been read, and say so."""
        left = [request_id for request_id, stream in streams.items() if not stream.finished_by_core]
        if left and self._dead is None:
            with suppress(EngineDead):
                self._channel.send(Abort(left))
        for stream in streams.values():
            stream.finished_by_core = True
            if (ended := stream.ended) is not None:
                stream.ended = None
                ended()

    def _fail_in_turn(self, streams: Mapping[str, OutputStream], error: EngineError) -> None:
        """Fail requests and make the core forget them, one after the other: there may be thousands at a time."""

        def fail(request_id: str, stream: OutputStream) -> None:
            if stream.finish_reason is None:
                stream.fail(error)
            self._end_in_core({request_id: stream})

        for request_id, stream in streams.items():
            turns().run(ENDINGS, partial(fail, request_id, stream))

    async def close(self) -> bool:
        """Shut the core down and stop listening to it; open streams fail.

        Returns:
            Whether the core was connected, so that it will end by itself.
        """
        if self._closed:
            return False
        self._closed = connected = True
        try:
            self._channel.send(Shutdown())
        except EngineDead:
            connected = False
        self._end("the server is shutting down")
        await self._stop_pinging()
        self._channel.close()
        return connected

    async def _stop_pinging(self) -> None:
        self._pinging.cancel()
        with suppress(asyncio.CancelledError):
            await self._pinging

    @override
    def fail(self, reason: str) -> None:
        if self._dead is None and self._ready.done():
            logger.error("the engine has stopped: %s", reason)
        if self._dead is None or not self._ready.done():
            self._end(reason)

    def _end(self, reason: str) -> None:
        error = EngineDead(f"The engine has stopped: {reason}")
        self._dead = self._dead or error
        self._ended.set()
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # marks it as retrieved; awaiting `ready` still raises it
        self._sleep_control.ended(self._dead)
        self._command_sender.ended(self._dead)
        self._fail_in_turn(dict(self._streams), self._dead)

    def _receive(self, message: CoreMessage) -> None:
        self._heartbeat.last_message = time.monotonic()
        try:
            self._handle(message)
        except Exception:  # later messages must still be handled
            logger.exception("a message from the engine could not be handled")

    def _handle(self, message: CoreMessage) -> None:
        match message:
            case StepOutput(outputs=outputs, stats=stats):
                self._stats = stats
                for output in outputs:
                    self._deliver(output)
                self.observers.on_step(stats)
            case Pong():
                self._heartbeat.answered()
            case SleepState():
                self._sleep_control.received(message)
            case CommandDone():
                self._command_sender.received(message)
            case EngineState():
                self._sleep_control.learned(message)
                self._command_sender.learned(is_paused=message.is_paused)
                self.on_state(message)
            case Ready(info=info) if not self._ready.done():
                if self._dead is not None:
                    self._dead = None
                    self._ended.clear()
                    self.observers.on_restart()
                self._ready.set_result(info)
            case CoreDied(error=error):
                self.fail(error)

    def _deliver(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None or stream.finish_reason is not None:
            return  # the abort is on its way
        try:
            self._put(stream, output)
        except Exception as error:  # fails this stream only
            logger.exception("an output of request %s could not be handled", output.request_id)
            stream.fail(RequestFailed(f"The output could not be handled: {type(error).__name__}: {error}"))
        self._end_if_finished(output.request_id, stream)

    def _put(self, stream: OutputStream, output: RequestOutput) -> None:
        times, now = stream.times, self._heartbeat.last_message
        if not isinstance(output, ErrorOutput):
            times.scheduled = times.scheduled or output.scheduled_at
        if isinstance(output, TokensOutput) and output.token_ids:
            self.observers.on_tokens(stream.request.origin, times, now, len(output.token_ids))
            times.first_token = times.first_token or now
            times.last_token = now
        stream.put(output)

    async def _ping(self) -> None:
        with suppress(EngineDead):
            await self.ready()
            while self._dead is None:
                self._heartbeat.ping(self._channel)
                await asyncio.sleep(_PING_EVERY)


def _raise(error: EngineError | None) -> None:
    if error is not None:
        raise error


class _Heartbeat:
    """The pings that are sent to a core, at most one at a time, and its answers.

    Attributes:
        last_message: monotonic seconds at which the core's last message arrived.
    """

    def __init__(self) -> None:
        self.last_message = time.monotonic()
        self._serials = itertools.count()
        self._unanswered: float | None = None  # when the ping was sent that has no answer yet

    def ping(self, channel: ClientChannel) -> None:
        """Send a ping, unless the last one has no answer.

        Raises:
            EngineDead: the core cannot be reached.
        """
        if self._unanswered is None:
            self._unanswered = time.monotonic()
            channel.send(Ping(next(self._serials)))

    def answered(self) -> None:
        """The core has answered, or has been replaced."""
        self._unanswered = None

    def unresponsive_seconds(self) -> float:
        """Seconds since the last message of a core that has not answered a ping; 0 if no ping is unanswered."""
        return 0.0 if self._unanswered is None else time.monotonic() - max(self._unanswered, self.last_message)
