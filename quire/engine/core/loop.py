"""EngineCore: the loop that receives requests, schedules steps, executes them and sends their outputs."""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from quire.engine.client.errors import MalformedMessage
from quire.engine.client.model_info import Generates, ModelKind, Pools, Transcribes
from quire.engine.client.protocol import (
    Abort,
    AddRequest,
    ClientMessage,
    Command,
    CommandDone,
    ErrorOutput,
    ExtendRequest,
    MemoryTag,
    Pause,
    Ping,
    Pong,
    ResetCaches,
    Resume,
    RunCommand,
    Shutdown,
    Sleep,
    SleepLevel,
    SleepState,
    StartProfile,
    StepOutput,
    StepStats,
    StopProfile,
    UpdateWeights,
    Wake,
)
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.step_observer import StepObserver, StepShare
from quire.engine.client.transport import CoreChannel
from quire.engine.core.gate import Gate
from quire.engine.core.item_validation import invalid_items
from quire.engine.core.offload import Offload
from quire.engine.core.profiling import Profiling
from quire.engine.core.sleep import AsleepExecutor, Sleeper
from quire.engine.core.transfer import Transfer
from quire.engine.core.update import WeightUpdate
from quire.engine.core.validation import drop_unknown_end_tokens, invalid_reason, invalid_tokens
from quire.engine.execution.cache import OutOfCacheMemory
from quire.engine.execution.executor import Executor, ParallelExecutor, PendingStep
from quire.engine.execution.profiler import ProfilerError, StepProfiler
from quire.engine.execution.sampling.compiler import GrammarCompiler
from quire.engine.models.errors import ModelError
from quire.engine.models.source import ReplacedInPart
from quire.engine.scheduling.encoder_scheduler import EncoderScheduler
from quire.engine.scheduling.plan import StepPlan
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.scheduling.streaming_scheduler import StreamingScheduler

logger = logging.getLogger(__name__)
_PREPARING_WAIT = 0.001  # seconds between looks at whether a request is ready
_LOADING_WAIT = 0.001  # seconds between looks at whether blocks were loaded, if nothing else can be done
_LOOK_AFTER = 0.002  # seconds between two checks for new messages while the steps of an encoder run
_PREFAULT_AFTER = 0.05  # seconds of idleness; a client that sends its next request at once must not wait for it
_ASLEEP = "the model is asleep; POST /wake_up wakes it"
_PAUSED_TOO_LONG = "too much was appended to the request while the engine waited for the end of others to pause"
_NOT_READ = "The KV blocks of the prompt could not be read from the server that has computed them"
_NO_TRANSFER = "the engine neither sends KV blocks to others nor reads theirs"
_TEXT = Generates()
_CHECK_AFTER = 3.0  # seconds of idleness; checking a large pool holds the GIL for long


class CoreStopped(Exception):
    """The front end asked the core to stop while it ran a command."""


class NotNow(Exception):
    """The state of the engine does not allow a command; the message has the reason."""


@dataclass(frozen=True, slots=True)
class _SubmittedStep:
    plan: StepPlan
    pending: PendingStep
    started: float  # monotonic seconds


class EngineCore:
    """Serve the requests that arrive on a channel until a `Shutdown` message.

    Attributes:
        step_observer: watches the steps; None: nobody does.
    """

    def __init__(
        self,
        scheduler: Scheduler | StreamingScheduler[Any] | EncoderScheduler,
        executor: Executor,
        channel: CoreChannel,
        *,
        vocab_size: int,
        seed: int = 0,
        grammars: GrammarCompiler | None = None,
        kind: ModelKind = _TEXT,
        sleeper: Sleeper[Any] | None = None,
        update: WeightUpdate | None = None,
        profiling: Profiling | None = None,
        on_close: Callable[[], None] = lambda: None,
        offload: Offload | None = None,
        transfer: Transfer | None = None,
    ) -> None:
        """Assemble a core.

        Args:
            scheduler: plans the steps.
            executor: runs the steps.
            channel: connection to the front end.
            vocab_size: number of columns of the model's logits.
            seed: base seed for requests without one.
            grammars: compiles the grammars of requests before they run; None if no request has a grammar.
            kind: what the model does.
            sleeper: frees and restores the memory of the model; None if the engine cannot sleep.
            update: replaces the weights of the model; None if they are never replaced.
            profiling: records steps; None if they never are.
            on_close: ends what observes the scheduler.
            offload: keeps blocks of the prefix cache in a second tier; None if there is none.
            transfer: sends blocks to other engines and reads theirs; None if there are none.
        """
        self.scheduler = scheduler
        self.executor = executor
        self.kind = kind
        self._channel = channel
        self._vocab_size = vocab_size
        # Hashed, so that the seeds of servers with neighbouring seeds do not overlap.
        self._seeds = itertools.count(int.from_bytes(hashlib.blake2b(b"%d" % seed, digest_size=7).digest()))
        self._grammars = grammars
        self._sleeper = sleeper
        self._update = update
        self._profiling = profiling or Profiling(StepProfiler(None, ""))
        self._on_close = on_close
        self._offload = offload
        self._transfer = transfer
        self._gate = Gate()
        self._steps = itertools.count(1)
        self._preparing: list[tuple[AddRequest, Future[Any]]] = []
        self._in_flight: deque[_SubmittedStep] = deque()
        self._can_prefault = True
        self._saving = False  # whether blocks may have to be saved, or reported as written
        self._prefault_at = 0.0  # when the core has been idle for long enough to prefault
        self._check_at: float | None = None  # when it has been idle for long enough to check itself
        self._running = True
        self.step_observer: StepObserver | None = None

    @property
    def has_work(self) -> bool:
        """Whether a step can be run, or is in flight."""
        return (self.scheduler.has_work and self._gate.lets_steps_run) or bool(self._in_flight)

    def run(self) -> None:
        """Loop until `Shutdown` arrives."""
        with suppress(CoreStopped):
            while self._running:
                self._drain_inbox()
                self._add_prepared()
                self.take_loaded()
                if self.has_work:
                    self.step()
                else:
                    self._idle()
                if self._gate.drains:
                    self._end_drain()
                if self._profiling.is_over:
                    self._stop_profile()

    def step(self) -> None:
        """Submit the next step; wait for the oldest one if no more may be in flight, or nothing could be submitted.

        The wait for a step of an encoder has a timeout, so that new messages are handled.
        """
        limit = self.executor.max_steps_in_flight
        encoder = self.scheduler if isinstance(self.scheduler, EncoderScheduler) else None
        if encoder is not None and len(self._in_flight) >= max(1, limit - 1):
            self._run_urgent(encoder)  # all threads are busy: the next step would wait for one of them
        submitted = len(self._in_flight) < limit and self.scheduler.has_work and self._submit()
        if submitted and len(self._in_flight) < limit:
            return
        if not self._in_flight:  # the requests that are not loading wait for blocks of those that are
            self._wait_for_blocks()
            return
        if encoder is None or self._in_flight[0].pending.wait(_LOOK_AFTER):
            self._finish(self._in_flight.popleft())

    def take_loaded(self) -> None:
        """Let requests go on whose blocks have come from a tier or another engine, and send blocks to others."""
        if not isinstance(self.scheduler, Scheduler):
            return
        scheduler, cache = self.scheduler, self.executor.cache
        if self.is_loading and cache is not None:
            if self._offload is not None:
                self._offload.receive(scheduler, cache)
            if self._transfer is not None:
                self._transfer.receive(scheduler, cache)
            self._end_loads(scheduler)
        if self._transfer is not None and self._transfer.serve(scheduler, cache) and not self.has_work:
            self._report_idle()

    def _end_loads(self, scheduler: Scheduler) -> None:
        """Queue the requests whose blocks are there, and tell the front end of those that fail."""
        ended = scheduler.end_loads()
        if self._transfer is not None and ended:
            self._transfer.note_ended(ended)
        failed = [load for load in ended if load.failure is not None and not scheduler.recomputes]
        if failed:
            ids = [load.request.id for load in failed]
            self._release(ids)
            if self.step_observer is not None:
                self.step_observer.on_abort(ids)
            outputs = [ErrorOutput(load.request.id, f"{_NOT_READ}: {load.failure}", is_remote=True) for load in failed]
            stats = self._stats()
            self._count_traffic(stats)
            self._channel.send(StepOutput(outputs, stats))

    def _wait_for_blocks(self) -> None:
        """Wait a moment for blocks of a tier or another engine."""
        waiting = self._offload or self._transfer
        assert waiting is not None
        waiting.wait(_LOADING_WAIT)

    @property
    def is_loading(self) -> bool:
        """Whether a request waits for blocks of a tier or another engine."""
        return isinstance(self.scheduler, Scheduler) and bool(self.scheduler.loads)

    def check(self) -> None:
        """Assert that scheduler and executor are consistent."""
        self.scheduler.check()
        self.executor.check()
        if self._offload is not None:
            self._offload.check()

    def close(self) -> None:
        """End the threads of the executor, of the grammar compiler and of what observes the scheduler."""
        self._profiling.close()
        if self._transfer is not None:
            self._transfer.close()
        if self._offload is not None:
            self._offload.close(self.executor.cache)
        self.executor.close()
        if self._grammars is not None:
            self._grammars.close()
        self._on_close()

    def _submit(self) -> bool:
        started = time.monotonic()
        plan = self.scheduler.schedule()
        if self._offload is not None and self.executor.cache is not None:
            self._offload.before_step(self.executor.cache)
        if plan.is_empty and (self._in_flight or self.is_loading):
            return False  # every sequence waits for a step in flight, or for blocks of requests that are loading
        with self._profiling.step(plan):
            pending = self.executor.submit(plan)
        self._in_flight.append(_SubmittedStep(plan, pending, started))
        return True

    def _run_urgent(self, scheduler: EncoderScheduler) -> None:
        """Run short requests in this thread: they need not wait for the steps in flight, which belong to others."""
        assert isinstance(self.executor, ParallelExecutor)
        plan = scheduler.schedule_urgent(step.plan for step in self._in_flight)
        if plan.encoder_requests:
            self._finish(_SubmittedStep(plan, self.executor.run_in_this_thread(plan), time.monotonic()))

    def _finish(self, step: _SubmittedStep) -> None:
        result = step.pending.result()
        outputs = self.scheduler.update(step.plan, result)
        self._release(output.request_id for output in outputs)
        stats = self._stats(step.plan)
        stats.step, stats.ended_at = next(self._steps), time.monotonic()
        stats.step_seconds = stats.ended_at - step.started
        if isinstance(self.scheduler, Scheduler):
            self.scheduler.run_ahead.measure(step.plan, result, stats.step_seconds)
        if self._offload is not None:
            self._after_step(self._offload, step.plan, stats)
        if self._transfer is not None:
            self._transfer.step_took(stats.step_seconds)
        self._count_traffic(stats)
        self._channel.send(StepOutput(outputs, stats))
        if self.step_observer is not None:
            self.step_observer.on_step(_shares(step.plan), outputs, step.started, stats.ended_at)
        self._can_prefault = True
        self._restart_idle_timers()

    def _after_step(self, offload: Offload, plan: StepPlan, stats: StepStats) -> None:
        if isinstance(self.scheduler, Scheduler) and self.executor.cache is not None:
            offload.measure(self.scheduler, plan, stats.step_seconds)
            offload.save(self.executor.cache)
        self._saving = True

    def _count_traffic(self, stats: StepStats) -> None:
        """Add what was read and written outside of memory to some statistics."""
        if self._offload is not None:
            self._offload.count(stats)
        if self._transfer is not None and isinstance(self.scheduler, Scheduler):
            self._transfer.count(self.scheduler, stats)

    def _finish_steps(self) -> None:
        """Wait for all steps in flight."""
        while self._in_flight:
            self._finish(self._in_flight.popleft())

    def _stats(self, plan: StepPlan | None = None) -> StepStats:
        """The statistics of the scheduler; requests that are held wait as well."""
        stats = self.scheduler.stats(plan)
        stats.waiting += len(self._gate)
        return stats

    def _idle(self) -> None:
        if self._saving and time.monotonic() >= self._prefault_at:
            self._save()
        if self._can_prefault and time.monotonic() >= self._prefault_at:
            self._can_prefault = self.executor.prefault()
        if self._check_at is not None and time.monotonic() >= self._check_at:
            self._check_at = None
            self.check()

    def _save(self) -> None:
        """Save blocks for a tier while there is nothing else to do, and report once all are written."""
        assert self._offload is not None
        can_save = self._offload.save(self.executor.cache)
        if not self._offload.unwritten:
            self._saving = False
            self._report_idle()
        elif not can_save:
            self._prefault_at = time.monotonic() + _PREFAULT_AFTER  # the tier writes what it has

    def _drain_inbox(self) -> None:
        """Handle all messages that have arrived; wait for one if there is nothing else to do."""
        wait = self._wait()
        while self._running:
            try:
                message = self._channel.receive(wait)
            except MalformedMessage as error:
                logger.error("dropped a malformed message: %s", error)
                continue
            if message is None:
                return
            self._handle(message)
            wait = 0.0

    def _handle(self, message: ClientMessage) -> None:
        match message:
            case AddRequest():
                if self.step_observer is not None:
                    self.step_observer.on_add(message)
                self._add(message)
            case ExtendRequest():
                self._extend(message)
            case Abort(request_ids=ids):
                self._preparing = [entry for entry in self._preparing if entry[0].request_id not in ids]
                self._gate.drop(ids)
                for request_id in ids:
                    self.scheduler.abort(request_id)
                self._release(ids)
                if self.step_observer is not None:
                    self.step_observer.on_abort(ids)
                if not self.has_work:
                    self._report_idle()
            case Sleep(level=level):
                self._sleep(level)
            case Wake(tags=tags):
                self._wake(tags)
            case RunCommand(serial=serial, command=command):
                self._run_command(serial, command)
            case Ping(serial=serial):
                self.executor.ensure_alive()
                self._channel.send(Pong(serial))
            case Shutdown():
                self._running = False

    def _sleep(self, level: SleepLevel) -> None:
        """Free the memory of the model. The front end has ended all requests; steps may still be in flight."""
        self._finish_steps()
        stats = self._stats()
        if self._sleeper is None:
            self._channel.send(SleepState(frozenset(), "the engine was started without --enable-sleep-mode"))
        elif self._preparing or stats.running or stats.waiting:
            self._channel.send(SleepState(self._sleeper.asleep, "requests are running"))
        else:
            if not isinstance(self.executor, AsleepExecutor):
                if self._offload is not None and self.executor.cache is not None:
                    self._offload.forget(self.executor.cache)
                self.executor.close()
                self.executor = AsleepExecutor()
                if isinstance(self.scheduler, Scheduler):
                    self.scheduler.reset_prefix_cache(preempt=False)  # its observers are those of the next one
                self.scheduler = self._sleeper.scheduler()  # its prefix cache and encoder cache are empty
            self._sleeper.sleep(level)
            self._channel.send(SleepState(self._sleeper.asleep))
            self._report_idle()

    def _wake(self, tags: frozenset[MemoryTag]) -> None:
        assert self._sleeper is not None, "only an engine that sleeps is woken"
        error = None
        try:
            self.executor = self._sleeper.wake(tags) or self.executor
        except (ModelError, OutOfCacheMemory, torch.OutOfMemoryError, MemoryError, OSError) as failure:
            logger.exception("the engine could not wake up")
            error = f"The model could not be woken: {failure}"
        self._channel.send(SleepState(self._sleeper.asleep, error))
        self._can_prefault = True
        self._restart_idle_timers()

    def _run_command(self, serial: int, command: Command) -> None:
        """Do what an operator asks for, between two steps."""
        self._finish_steps()
        error, invalid = None, False
        try:
            match command:
                case ResetCaches():
                    self._reset_caches(command)
                case Pause(drain=True):
                    self._gate.is_closed = True
                    self._gate.waiting.append(serial)
                    return  # `_end_drain` answers
                case Pause():
                    self._gate.is_closed = True
                    self._release_held("another /pause has ended the wait for requests to end")
                case Resume():
                    self._gate.is_closed = False
                    self._release_held("POST /resume has ended the wait for requests to end")
                case UpdateWeights(folder=folder):
                    self._update_weights(Path(folder))
                case StartProfile():
                    self._profiling.start(self._poll)
                case StopProfile():
                    self._profiling.stop(self._poll)
        except (NotNow, ProfilerError) as refusal:
            error = str(refusal)
        except ReplacedInPart:
            raise
        except ModelError as refusal:
            error, invalid = str(refusal), True
        self._report_idle()
        self._channel.send(CommandDone(serial, error, invalid))

    def _end_drain(self) -> None:
        """Answer the commands that wait for the end of all requests, if there are none any more."""
        stats = self.scheduler.stats()
        if not (self._preparing or self._in_flight or stats.running or stats.waiting):
            self._release_held(None)

    def _release_held(self, error: str | None) -> None:
        """Let the engine drain no longer. `error`: why requests are left."""
        serials, held = self._gate.end_drain()
        for message in held:  # which the observer of steps has seen already
            if isinstance(message, AddRequest):
                self._add(message)
            else:
                self._extend(message)
        for serial in serials:
            self._channel.send(CommandDone(serial, error))

    def _reset_caches(self, command: ResetCaches) -> None:
        if command.external and self._offload is None:
            raise NotNow(
                "There are no tiers of the prefix cache, which --kv-offloading-size and --kv-offloading-disk-size make."
            )
        if isinstance(self.scheduler, StreamingScheduler):
            if command.preempt:
                self._check_no_streams()
        elif isinstance(self.scheduler, Scheduler):
            if command.items:
                self.scheduler.reset_encoder_cache()
            if command.prefixes:
                self.scheduler.reset_prefix_cache(preempt=command.preempt)
            if command.external and self._offload is not None:
                self._offload.clear()

    def _check_no_streams(self) -> None:
        if isinstance(self.scheduler, StreamingScheduler) and self.scheduler.stats().running:
            raise NotNow(
                "Requests are running, and a model that transcribes audio while it arrives cannot compute them anew: "
                "wait for their end, or abort them, with POST /pause."
            )

    def _update_weights(self, folder: Path) -> None:
        """Replace the weights of the model. An error after the first was written ends the engine."""
        if self._update is None:
            raise NotNow("The server was started without --weight-update-path, which /update_weights needs.")
        if self._sleeper is not None and "weights" in self._sleeper.asleep:
            raise NotNow("The weights are asleep: POST /wake_up?tags=weights makes room for new ones.")
        self._check_no_streams()
        self._update.run(folder, self._poll)
        if self._offload is not None:
            self._offload.weights_replaced()
        if self._transfer is not None:
            self._transfer.stop()
        if isinstance(self.scheduler, Scheduler):
            self.scheduler.reset_encoder_cache()
            self.scheduler.reset_prefix_cache(preempt=True)

    def _poll(self) -> None:
        """Answer probes while a command takes long; other messages are handled afterwards.

        Raises:
            CoreStopped: the engine is to stop.
        """
        while True:
            try:
                message = self._channel.receive_arrived(Ping, Shutdown)
            except MalformedMessage as error:
                logger.error("dropped a malformed message: %s", error)
                continue
            match message:
                case None:
                    return
                case Ping(serial=serial):
                    self._channel.send(Pong(serial))
                case Shutdown():
                    raise CoreStopped

    def _stop_profile(self) -> None:
        """Write a profile that has reached its limit."""
        self._finish_steps()
        try:
            self._profiling.stop(self._poll, by_limit=True)
        except ProfilerError as error:
            logger.error("%s", error)

    def _report_idle(self) -> None:
        """Send the gauges, since no step will."""
        stats = self._stats()
        self._count_traffic(stats)
        self._channel.send(StepOutput([], stats))
        self._restart_idle_timers()

    def _restart_idle_timers(self) -> None:
        now = time.monotonic()
        self._prefault_at = now + _PREFAULT_AFTER
        self._check_at = None if self.has_work else now + _CHECK_AFTER

    def _wait(self) -> float | None:
        """Seconds to wait for a message; None to wait without a limit."""
        if self.has_work:
            return 0.0
        if self._transfer is not None and self._transfer.has_reads:
            return 0.0
        if self._preparing or self.is_loading:
            return _PREPARING_WAIT
        tasks = [self._prefault_at] if self._can_prefault or self._saving else []
        if (end := self._profiling.ends_at) is not None:
            tasks.append(end)
        if self._check_at is not None:
            tasks.append(self._check_at)
        if isinstance(self.scheduler, Scheduler) and self.scheduler.held:
            tasks.append(self.scheduler.held.next_expiry)
        return max(0.0, min(tasks) - time.monotonic()) if tasks else None

    def _add(self, message: AddRequest) -> None:
        params = message.params
        if isinstance(params, SamplingParams):
            params = drop_unknown_end_tokens(params, self._vocab_size)
            if params.seed is None:
                params = msgspec.structs.replace(params, seed=next(self._seeds))
            message = msgspec.structs.replace(message, params=params)
        elif params.pooling_type is None:
            pooling_type = self.kind.pooling_type if isinstance(self.kind, Pools) else "last"
            params = msgspec.structs.replace(params, pooling_type=pooling_type)
            message = msgspec.structs.replace(message, params=params)
        error = _ASLEEP if isinstance(self.executor, AsleepExecutor) else self._invalid_reason(message)
        if error is not None:
            self._send_refusal(message.request_id, error)
        elif self._gate.drains:
            self._gate.hold(message)
            self._report_idle()
        elif self._grammars is not None and isinstance(params, SamplingParams) and params.grammar:
            self._preparing.append((message, self._grammars.prepare(message.request_id, params)))
        else:
            self._queue(message)

    def _queue(self, message: AddRequest) -> None:
        """Add a request to the scheduler, and report that it waits if no step will."""
        self.scheduler.add(message)
        if not self.has_work:  # the engine is paused, or the request is loading
            self._report_idle()

    def _extend(self, message: ExtendRequest) -> None:
        if isinstance(self.scheduler, EncoderScheduler):
            return  # it has no open requests
        request_id, error = message.request_id, invalid_tokens(message.tokens, self._vocab_size)
        if request_id in self._gate:
            if not self._gate.hold_extension(message):
                self._send_refusal(request_id, _PAUSED_TOO_LONG)
            return
        if request_id not in self.scheduler:
            return
        if error is None and message.items and isinstance(self.kind, Transcribes):
            error = "the model accepts one audio item per request; further pieces of the prompt cannot have items"
        elif error is None and message.items:
            error = invalid_items(message.items, len(message.tokens), self.kind)
        if error is not None:
            self.scheduler.abort(request_id)
        else:
            tokens = message.tokens.tolist()
            error = self.scheduler.extend(request_id, tokens, last=message.last, items=message.items)
        if error is not None:
            self._release([request_id])
            self._send_refusal(request_id, error)

    def _add_prepared(self) -> None:
        """Queue the requests that have become ready."""
        if self._grammars is None or not self._preparing:
            return
        self._grammars.advance()
        entries, self._preparing = self._preparing, []
        for message, prepared in entries:
            if not prepared.done():
                self._preparing.append((message, prepared))
            elif (error := prepared.exception()) is None:
                self._queue(message)
            else:
                self._send_refusal(message.request_id, str(error))
                self._grammars.release(message.request_id)

    def _release(self, request_ids: Iterable[str]) -> None:
        """Requests may have ended: their grammars are not needed any more."""
        if self._grammars is not None:
            for request_id in request_ids:
                if request_id not in self.scheduler:
                    self._grammars.release(request_id)

    def _send_refusal(self, request_id: str, error: str) -> None:
        if self.step_observer is not None:
            self.step_observer.on_abort([request_id])
        self._channel.send(StepOutput([ErrorOutput(request_id, error, invalid=True)], self._stats()))

    def _invalid_reason(self, message: AddRequest) -> str | None:
        preparing = any(entry.request_id == message.request_id for entry, _ in self._preparing)
        if preparing or message.request_id in self.scheduler or message.request_id in self._gate:
            return f"request id {message.request_id} is in use"
        if message.is_held or message.remote is not None:
            refusal = _NO_TRANSFER if self._transfer is None else self._transfer.refusal(message)
            if refusal is not None:
                return refusal
        limit = self.scheduler.limits.max_model_len
        return invalid_reason(message, self.kind, vocab_size=self._vocab_size, max_model_len=limit)


def _shares(plan: StepPlan) -> list[StepShare]:
    """What a step computes for each of its sequences."""
    whole = [StepShare(request.request_id, len(request.prompt), samples=True) for request in plan.encoder_requests]
    return whole + [StepShare(item.request_id, item.count, item.samples) for item in plan.scheduled]
