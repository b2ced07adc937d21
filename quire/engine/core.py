"""The core's loop: drain the inbox, schedule, execute, publish. The one file that knows scheduler and runner both."""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from tqdm import tqdm

from quire.config.options import EngineOptions, ModelOptions
from quire.engine.execution.attention.paged import PagedAttention
from quire.engine.execution.cache import KVCache, OutOfCacheMemory, block_bytes, count_blocks
from quire.engine.execution.memory import keep_freed_memory
from quire.engine.execution.runner import ModelRunner
from quire.engine.execution.sampling.sampler import Sampler
from quire.engine.execution.sampling.structure import Grammars
from quire.engine.execution.table import RequestTable
from quire.engine.models.blueprint import Blueprint
from quire.engine.models.checkpoint import Progress
from quire.engine.models.errors import ModelError
from quire.engine.models.loader import LoadedModel, load_model
from quire.engine.objections import objection, without_foreign_ends
from quire.engine.scheduling.blocks import BlockPool, hasher_named
from quire.engine.scheduling.plan import StepPlan, StepResult
from quire.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from quire.engine.wire.errors import MalformedMessage
from quire.engine.wire.protocol import (
    Abort,
    AddRequest,
    CoreDied,
    FrontMessage,
    ModelInfo,
    Ping,
    Pong,
    Ready,
    SamplingParams,
    SequenceOutput,
    Shutdown,
    StepOutput,
)
from quire.engine.wire.transport import CoreChannel
from quire.kernels import native

logger = logging.getLogger(__name__)
_PREPARING_WAIT = 0.001  # seconds between looks at whether a request is ready
_FIND_AFTER = 0.05  # seconds of idleness; who is answered and asks again at once shall not wait for it
_CHECK_AFTER = 3.0  # seconds of idleness; the check of a large pool holds the GIL for long


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """All that a core is started with. `memory_share`: bytes for its KV cache, if others load beside it."""

    folder: Path
    blueprint: Blueprint
    model: ModelOptions
    engine: EngineOptions
    memory_share: int | None = None


class EngineCore:
    """Serves the requests that come over a channel until it is told to stop."""

    def __init__(
        self,
        scheduler: Scheduler,
        execute: Callable[[StepPlan], StepResult],
        channel: CoreChannel,
        *,
        vocab_size: int,
        seed: int = 0,
        prepare: Callable[[SamplingParams], Future[Any] | None] = lambda _: None,
        check: Callable[[], None] = lambda: None,
        find_ahead: Callable[[], bool] = lambda: False,
    ) -> None:
        """What a core is made of.

        Args:
            scheduler: decides what a step does.
            execute: does it.
            channel: to the front end.
            vocab_size: rows of the model's logits.
            seed: of the seeds that requests get which bring none.
            prepare: begins what has to be done before a request may run, if anything.
            check: asserts that the books balance; called once nothing has been left to do for a while.
            find_ahead: prepares a little for later steps, and gives whether there is more; called while idle.
        """
        self._scheduler = scheduler
        self._execute = execute
        self._channel = channel
        self._vocab_size = vocab_size
        # Far from other servers' seeds, whatever the size of ours, with room to count in 64 bits.
        self._seeds = itertools.count(int.from_bytes(hashlib.blake2b(b"%d" % seed, digest_size=7).digest()))
        self._prepare = prepare
        self._preparing: list[tuple[AddRequest, Future[Any]]] = []
        self.check = check
        self._find_ahead = find_ahead
        self._can_find = True
        self._find_at = 0.0  # when idleness has lasted long enough to prepare for later steps
        self._check_at: float | None = None  # when it has lasted long enough for `check`
        self._running = True

    def run(self) -> None:
        """Loop until `Shutdown` comes."""
        while self._running:
            self._drain_inbox()
            self._add_prepared()
            if self._scheduler.has_work:
                self.step()
            else:
                self._idle()

    def step(self) -> None:
        """Schedule, execute, publish once."""
        started = time.monotonic()
        plan = self._scheduler.plan()
        outputs = self._scheduler.finish(plan, self._execute(plan))
        stats = self._scheduler.stats()
        stats.step_seconds = time.monotonic() - started
        self._channel.send(StepOutput(outputs, stats))
        self._can_find = True
        self._note_idleness()

    def _idle(self) -> None:
        if self._can_find and time.monotonic() >= self._find_at:
            self._can_find = self._find_ahead()
        if self._check_at is not None and time.monotonic() >= self._check_at:
            self._check_at = None
            self.check()

    def _drain_inbox(self) -> None:
        """Take all messages that are there; wait for one if there is nothing else to do."""
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

    def _handle(self, message: FrontMessage) -> None:
        match message:
            case AddRequest():
                self._add(message)
            case Abort(request_ids=ids):
                self._preparing = [entry for entry in self._preparing if entry[0].request_id not in ids]
                for request_id in ids:
                    self._scheduler.abort(request_id)
                if not self._scheduler.has_work:
                    self._report_idle()
            case Ping(serial=serial):
                self._channel.send(Pong(serial))
            case Shutdown():
                self._running = False

    def _report_idle(self) -> None:
        """Without a step to come, let the front end know that nothing is held any more."""
        self._channel.send(StepOutput([], self._scheduler.idle_stats()))
        self._note_idleness()

    def _note_idleness(self) -> None:
        now = time.monotonic()
        self._find_at = now + _FIND_AFTER
        self._check_at = None if self._scheduler.has_work else now + _CHECK_AFTER

    def _wait(self) -> float | None:
        """Seconds to wait for a message; none for as long as it takes."""
        if self._scheduler.has_work:
            return 0.0
        if self._preparing:
            return _PREPARING_WAIT
        tasks = [self._find_at] if self._can_find else []
        if self._check_at is not None:
            tasks.append(self._check_at)
        return max(0.0, min(tasks) - time.monotonic()) if tasks else None

    def _add(self, message: AddRequest) -> None:
        params = without_foreign_ends(message.params, self._vocab_size)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=next(self._seeds))
        message = msgspec.structs.replace(message, params=params)
        error = self._objection(message)
        if error is not None:
            self._refuse(message, error)
        elif (prepared := self._prepare(params)) is None:
            self._scheduler.add(message)
        else:
            self._preparing.append((message, prepared))

    def _add_prepared(self) -> None:
        """Let in the requests that have become ready."""
        entries, self._preparing = self._preparing, []
        for message, prepared in entries:
            if not prepared.done():
                self._preparing.append((message, prepared))
            elif (error := prepared.exception()) is None:
                self._scheduler.add(message)
            else:
                self._refuse(message, str(error))

    def _refuse(self, message: AddRequest, error: str) -> None:
        output = SequenceOutput(message.request_id, [], "error", error=error)
        self._channel.send(StepOutput([output], self._scheduler.idle_stats()))

    def _objection(self, message: AddRequest) -> str | None:
        preparing = any(entry.request_id == message.request_id for entry, _ in self._preparing)
        if preparing or message.request_id in self._scheduler:
            return f"request id {message.request_id} is in use"
        limit = self._scheduler.limits.max_model_len
        return objection(message, vocab_size=self._vocab_size, max_model_len=limit)


def serve_core(config: CoreConfig, address: str) -> None:
    """Body of a core's thread or process: load the model, serve, and say so if either fails."""
    with CoreChannel(address) as channel:
        try:
            core, info = build_core(config, channel)
            channel.send(Ready(info))
            core.run()
        except (ModelError, OutOfCacheMemory) as error:
            channel.send(CoreDied(str(error)))
        except Exception as error:  # the thread's edge: whatever ends the core must reach the front end
            logger.exception("the engine ends")
            channel.send(CoreDied(f"{type(error).__name__}: {error}"))


def build_core(config: CoreConfig, channel: CoreChannel) -> tuple[EngineCore, ModelInfo]:
    """Load a model and put an engine around it.

    Raises:
        ModelError: the model cannot be loaded.
        OutOfCacheMemory: the KV cache does not fit, or holds too little.
    """
    if config.engine.num_threads is not None:
        torch.set_num_threads(config.engine.num_threads)
    loaded = load_model(config.folder, config.blueprint, config.model, _progress_bar)
    options = config.engine
    cache_dtype = torch.int8 if options.kv_cache_dtype == "int8" else loaded.dtype
    per_block = block_bytes(loaded.model.caches, options.block_size, cache_dtype)
    num_blocks = count_blocks(options, per_block, loaded.context_len, config.memory_share)
    context_len = _fitting_context(loaded, config, num_blocks)
    loaded.model.set_context(context_len)
    table = RequestTable(options.max_num_seqs, context_len, options.block_size)
    reserve = min(4 * loaded.weight_bytes, num_blocks * per_block // 4)
    cache = KVCache(loaded.model.caches, num_blocks, options.block_size, cache_dtype, reserve)
    grammars = Grammars(config.folder, loaded.vocab_size)
    sampler = Sampler(table, loaded.vocab_size, grammars.walk)
    runner = ModelRunner(loaded.model, PagedAttention(cache, table, loaded.dtype), table, sampler)
    scheduler = _scheduler(options, context_len, num_blocks)

    def check() -> None:
        scheduler.check()
        runner.check()

    if native.instructions() is None:
        logger.warning("Quire's compiled kernels are missing: torch runs everything, several times slower")
    else:
        logger.info("kernels for %s", native.instructions())
    core = EngineCore(
        scheduler,
        runner.execute,
        channel,
        vocab_size=loaded.vocab_size,
        seed=options.seed,
        prepare=grammars.prepare,
        check=check,
        find_ahead=cache.find_ahead,
    )
    keep_freed_memory()  # not before, for loading frees what is not needed again
    info = ModelInfo(
        architecture=loaded.architecture,
        implementation=loaded.implementation,
        device=config.model.device,
        dtype=str(loaded.dtype).removeprefix("torch."),
        vocab_size=loaded.vocab_size,
        max_model_len=context_len,
        num_blocks=num_blocks,
        block_size=options.block_size,
        weight_bytes=loaded.weight_bytes,
        cache_bytes=num_blocks * per_block,
    )
    return core, info


def _scheduler(options: EngineOptions, context_len: int, num_blocks: int) -> Scheduler:
    limits = SchedulerLimits(
        max_seqs=options.max_num_seqs,
        max_tokens=options.max_num_batched_tokens,
        max_model_len=context_len,
        max_draft=options.num_speculative_tokens if options.speculation == "ngram" else 0,
    )
    return Scheduler(
        limits,
        BlockPool(num_blocks, options.block_size),
        hasher=hasher_named(options.prefix_hash) if options.prefix_caching else None,
        by_priority=options.scheduling_policy == "priority",
    )


def _fitting_context(loaded: LoadedModel, config: CoreConfig, num_blocks: int) -> int:
    """The context length that the KV cache can hold, so that one sequence alone always fits."""
    held = num_blocks * config.engine.block_size
    if held >= loaded.context_len:
        return loaded.context_len
    if config.model.max_model_len is not None:
        raise OutOfCacheMemory(
            f"the KV cache holds {held} tokens, fewer than --max-model-len {config.model.max_model_len}: "
            "lower it, or raise --kv-cache-memory"
        )
    logger.warning("the KV cache holds %d tokens, so the context is that long instead of %d", held, loaded.context_len)
    return held


@contextmanager
def _progress_bar(total: int) -> Iterator[Progress]:
    with tqdm(total=total, desc="loading weights", unit="B", unit_scale=True, leave=False) as bar:

        def advance(count: int) -> None:
            bar.update(count)

        yield advance
    logger.debug("resident after loading: %.2f GiB", psutil.Process().memory_info().rss / 2**30)
