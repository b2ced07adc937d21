"""Builds the ranks that run a model together: the core's part, and the workers that follow it."""

from __future__ import annotations

import gc
import logging
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import torch

from quire.allocator import keep_freed_memory, return_freed_memory
from quire.engine.build.cache import SlotCounts, cache_memory, plan_cache
from quire.engine.build.core_config import CoreConfig
from quire.engine.build.warm_up import warm_up_vision
from quire.engine.client.launch import allowed_cores
from quire.engine.client.protocol import StartProfile, StopProfile, UpdateWeights
from quire.engine.execution.cache import KVCache, OutOfCacheMemory, count_blocks
from quire.engine.execution.devices.device import Device
from quire.engine.execution.devices.select import find_device
from quire.engine.execution.executor import Executor
from quire.engine.execution.inputs import InputBuilder
from quire.engine.execution.item_encoder import item_encoder
from quire.engine.execution.pooling import hidden_states
from quire.engine.execution.profiler import ProfilerError, StepProfiler
from quire.engine.execution.ranks.commands import RankCommands
from quire.engine.execution.ranks.executor import ShardedExecutor
from quire.engine.execution.ranks.messages import (
    Allocate,
    CommandEnded,
    Connect,
    Counted,
    Failed,
    Loaded,
    RankChannel,
    RankCommand,
    Ready,
    ReceivedSteps,
    RunStep,
    ToWorker,
)
from quire.engine.execution.ranks.nodes import JoinedNode, NodeListener
from quire.engine.execution.ranks.runner import FollowingRunner, LeadingRunner, PipelineRunner
from quire.engine.execution.ranks.workers import Launcher, Workers, rank_process
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.runner import ModelRunner
from quire.engine.execution.sampling.sampler import Sampler
from quire.engine.execution.states import StateCaches
from quire.engine.models.checkpoint.checkpoint import Progress
from quire.engine.models.distributed.group import RankGroups
from quire.engine.models.distributed.placement import Placement
from quire.engine.models.distributed.rendezvous import FileRendezvous, Rendezvous, StoreServer
from quire.engine.models.errors import ModelError, UnsupportedModel
from quire.engine.models.loader import LoadedModel
from quire.engine.models.networks.decoder import LanguageModel
from quire.engine.models.sharding.decoder import check_parallel
from quire.engine.models.sharding.shard import check_divisible
from quire.engine.models.source import WeightSource
from quire.engine.models.specs.decoder import DecoderSpec
from quire.engine.scheduling.block_tables import BlockGroups
from quire.kernels import native

logger = logging.getLogger(__name__)
Poll = Callable[[], None]
_PREFAULT_AFTER = 0.05  # seconds without a step
_CGROUP = Path("/sys/fs/cgroup")
# Of control groups version 2 and 1: microseconds of CPU time, in so many microseconds.
_CPU_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))


class Ranks:
    """The core's view of the ranks of its model.

    Attributes:
        groups: the connections of rank 0.
        runner_type: the class of its runner.
        weight_bytes: bytes of the workers' weights.
        cache_bytes: bytes of the workers' KV caches.
        slot_bytes: bytes of the states of a sequence, on the worker where they are most.
    """

    def __init__(
        self,
        config: CoreConfig,
        device: Device,
        launch: Launcher = rank_process,
        wait_for_nodes: Callable[[], tuple[list[JoinedNode], NodeListener]] | None = None,
    ) -> None:
        """Start the workers, which load their parts of the model.

        Args:
            config: of the model.
            device: of this rank.
            launch: starts the workers of this machine.
            wait_for_nodes: waits for the other nodes; None: all ranks are on this machine.

        Raises:
            UnsupportedModel: the model cannot be divided like this, or there are not enough GPUs.
            NodesMissing: another node has not come, or does not fit.
        """
        placement = Placement.of(config.parallel)
        check_gpus(config, device)
        check_parallel(config.model_config)
        check_divisible(cast("DecoderSpec", config.model_config.spec), placement)
        logger.info(
            "the model is divided among %d ranks: %d share each layer, in %d stages",
            placement.ranks,
            placement.tensor_size,
            placement.stages,
        )
        nodes: list[JoinedNode] = []
        self._store: StoreServer | None = None
        if wait_for_nodes is None:
            rendezvous: Rendezvous = FileRendezvous.new()
        else:
            nodes, listener = wait_for_nodes()
            rendezvous, self._store = listener.rendezvous, listener.store
        self.groups = RankGroups.of(placement)
        self.runner_type: type[ModelRunner] = LeadingRunner if placement.stages == 1 else PipelineRunner
        self.weight_bytes = self.cache_bytes = self.slot_bytes = 0
        self._is_host = device.torch_device.type == "cpu"
        self._workers = Workers(partial(run_rank, config), config.parallel.local_ranks, rendezvous, launch, nodes)

    def connect(self, device: Device, dtype: torch.dtype, poll: Poll) -> None:
        """Wait until all ranks have loaded their parts, and connect them; `poll` is called meanwhile.

        `dtype`: in which this rank runs the model.

        Raises:
            RankDied: a worker has failed.
            UnsupportedModel: another rank runs the model in another data type.
        """
        replies = self._workers.collect(Loaded, poll)
        for rank, reply in enumerate(replies, 1):
            if reply.dtype != str(dtype):
                raise UnsupportedModel(
                    f"--dtype auto is {reply.dtype} on rank {rank} and {dtype} on rank 0: set it to one of both"
                )
        self.weight_bytes = sum(reply.weight_bytes for reply in replies)
        self._workers.send(Connect())
        self._workers.run(partial(_connect, self.groups, self._workers.rendezvous, device), poll)
        self._workers.watch(self.groups.abort)

    def noticing_death(self) -> AbstractContextManager[None]:
        """Raise RankDied in place of an error that the end of a worker has caused."""
        return self._workers.noticing_death()

    def least(self, num_blocks: int, slots: SlotCounts, poll: Poll) -> tuple[int, SlotCounts]:
        """The KV blocks and the slots that every rank has memory for. `num_blocks`, `slots`: those of this one."""
        counts = self._workers.collect(Counted, poll)  # all are connected
        if self._store is not None and self._is_host:  # NCCL goes on to use it
            self._store.close()
        least = min(num_blocks, *(reply.num_blocks for reply in counts))
        slots = SlotCounts(
            min(slots.sequences, *(reply.sequences for reply in counts)),
            min(slots.spare, *(reply.spare_slots for reply in counts)),
        )
        self.slot_bytes = max(reply.slot_bytes for reply in counts)
        self.cache_bytes = sum(least * reply.block_bytes + slots.total * reply.slot_bytes for reply in counts)
        return least, slots

    def allocate(self, num_blocks: int, context_len: int, slots: SlotCounts, snapshots: int) -> None:
        """Let all workers allocate their KV caches and prepare for steps, as this rank does next."""
        self._workers.send(Allocate(num_blocks, context_len, slots.sequences, slots.spare, snapshots))

    def wait_until_ready(self, poll: Poll) -> None:
        """Wait until all workers are ready for steps.

        Raises:
            RankDied: a worker has failed.
        """
        self._workers.collect(Ready, poll)

    @property
    def commands(self) -> RankCommands:
        """Sends commands to the workers."""
        return RankCommands(self._workers)

    def executor(self, inner: Executor) -> ShardedExecutor:
        """The executor of all ranks, which then owns the workers. `inner`: that of rank 0."""
        return ShardedExecutor(inner, self._workers, self.groups)

    def close(self, error: str = "") -> None:
        """End the workers, if there is no executor. `error`: see `Workers.close`."""
        self._workers.close(error)
        self.groups.close()
        if self._store is not None:
            self._store.close()


def check_gpus(config: CoreConfig, device: Device) -> None:
    """Raise UnsupportedModel if this machine has fewer GPUs than ranks."""
    local, count = config.parallel.local_ranks, torch.cuda.device_count()
    if device.torch_device.type != "cuda" or count >= local:
        return
    divided = f", divided by --nnodes {config.parallel.nnodes}," if config.parallel.nnodes > 1 else ""
    raise UnsupportedModel(
        f"--tensor-parallel-size times --pipeline-parallel-size{divided} is {local}, but there are {count} GPUs: "
        "it must not be larger than that"
    )


def set_threads(config: CoreConfig) -> None:
    """Set the threads of the calling thread's kernels: as configured, or this rank's share of the cores."""
    threads = config.engine.num_threads or max(1, usable_cores(sharers=config.sharers) // config.parallel.local_ranks)
    if threads != torch.get_num_threads():
        native.set_threads(threads)


def usable_cores(cgroup: Path = _CGROUP, sharers: int = 1) -> int:
    """Return how many threads torch would start, or how many the control group's quota lets run all the time.

    `sharers`: processes that share the quota, each with cores of its own.
    """
    cores = min(torch.get_num_threads(), len(allowed_cores()))
    for files in _CPU_QUOTAS:
        with suppress(OSError, ValueError):  # there are no such files, or they say "max"
            quota, period = map(int, " ".join((cgroup / name).read_text(encoding="ascii") for name in files).split())
            if quota > 0:
                cores = min(cores, max(1, quota // period // sharers))
    return cores


def weight_source(config: CoreConfig, device: Device, groups: RankGroups | None) -> WeightSource:
    """Where a rank loads its part of the model from; without `groups` all of it."""
    return WeightSource(
        config.folder,
        config.model_config,
        config.model,
        device,
        groups,
        is_replaceable=config.engine.weight_update_path is not None,
    )


def step_profiler(config: CoreConfig, rank: int = 0) -> StepProfiler:
    """The profiler of a rank."""
    replica = f"-replica-{config.replica}" if config.sharers > 1 or config.replica else ""
    return StepProfiler(config.engine.profiler, f"{config.model_config.model_type}{replica}-rank-{rank}")


def input_builder(config: CoreConfig, device: Device, table: RequestTable) -> InputBuilder:
    """The builder of step inputs, without padding for CUDA graphs where these do not capture steps.

    Not with several ranks, because of their collectives.
    """
    options = config.engine
    if Placement.of(config.parallel).ranks > 1:
        options = options.model_copy(update={"enforce_eager": True})
    return device.input_builder(table, options)


def request_table(
    config: CoreConfig, model: LanguageModel, groups: BlockGroups, context_len: int, cross_len: int = 0
) -> RequestTable:
    """The request table. `cross_len`: see there.

    Raises:
        OutOfCacheMemory: there is no memory for it.
    """
    options = config.engine
    try:
        return RequestTable(
            options.max_num_seqs,
            context_len,
            options.block_size,
            model.rope_switch,
            cross_len,
            windows=groups.windows,
        )
    except MemoryError as error:
        rows = f"{options.max_num_seqs} sequences of {context_len} tokens"
        raise OutOfCacheMemory(f"no memory for a table of {rows}: lower --max-num-seqs or --max-model-len") from error


def state_caches(cache: KVCache, table: RequestTable, snapshots: int) -> StateCaches | None:
    """The states of sequences; None if the layers of this rank have none. `snapshots`: the most that are saved."""
    return None if cache.states is None else StateCaches(cache.states, len(table.lengths), snapshots)


def run_rank(config: CoreConfig, rank: int, rendezvous: Rendezvous, connection: Connection) -> None:
    """Body of a worker's process or thread: load a part of the model, then run the core's plans until it says stop."""
    config.start_process()
    channel = RankChannel(connection, ToWorker)
    groups = RankGroups.of(Placement.of(config.parallel, rank))
    try:
        device = find_device(config.model.device)
        with device.activate():
            follower = _build_follower(config, groups, device, rendezvous, channel)
            if multiprocessing.parent_process() is not None:  # not in a thread of a test
                gc.freeze()  # as the core does
            steps, prefaults = ReceivedSteps(channel), True
            while True:
                message = steps.next(_PREFAULT_AFTER if prefaults else None)
                match message:
                    case None:
                        prefaults = follower.cache.prefault()
                    case RunStep(plan=plan, sampled=sampled):
                        with follower.profiler.step(plan):
                            follower.runner.append(sampled)
                            follower.runner.execute(plan)
                        prefaults = True
                    case _:
                        channel.send(CommandEnded(follower.run(message)))
    except (EOFError, BrokenPipeError):
        logger.debug("a rank ended with its core")
    except (ModelError, OutOfCacheMemory) as error:
        _report(channel, str(error))
    except Exception as error:  # the process's edge: whatever ends a rank must reach the core
        logger.exception("rank %d ended with an error", rank)
        _report(channel, f"{type(error).__name__}: {error}")
    finally:
        groups.close()
        channel.close()


def _report(channel: RankChannel, error: str) -> None:
    with suppress(OSError):
        channel.send(Failed(error))


@dataclass(frozen=True, slots=True)
class _Follower:
    """A worker's part of the model, and what runs it."""

    source: WeightSource
    loaded: LoadedModel
    runner: FollowingRunner
    cache: KVCache
    profiler: StepProfiler

    def run(self, command: RankCommand) -> str | None:
        """Run a command; returns why that was not possible.

        Raises:
            ModelError: weights could not be read, which ends the worker.
        """
        try:
            match command:
                case UpdateWeights(folder=folder):
                    self.source.replace_weights(self.loaded, Path(folder), _no_progress)
                case StartProfile():
                    self.profiler.start()
                case StopProfile():
                    self.profiler.stop()
        except ProfilerError as error:
            return str(error)
        return None


def _build_follower(
    config: CoreConfig, groups: RankGroups, device: Device, rendezvous: Rendezvous, channel: RankChannel
) -> _Follower:
    set_threads(config)
    source = weight_source(config, device, groups)
    loaded = source.load(_no_progress)
    return_freed_memory()
    keep_freed_memory()
    model = cast("LanguageModel", loaded.model)
    plan = plan_cache(loaded, config, device)
    channel.send(Loaded(loaded.weight_bytes, str(loaded.dtype)))
    channel.receive_one(Connect)
    _connect(groups, rendezvous, device)
    step = config.engine.max_num_batched_tokens
    needed = plan.most_blocks(loaded.context_len, step)
    available = cache_memory(loaded, config, device, 0)
    slots = plan.count_slots(config.engine, loaded.context_len, step, available)
    num_blocks = count_blocks(config.engine, plan.block_bytes, needed, available, slots.total * plan.slot_bytes)
    channel.send(Counted(num_blocks, plan.block_bytes, slots.sequences, slots.spare, plan.slot_bytes))
    message = channel.receive_one(Allocate)
    model.set_context(message.context_len)
    slots = SlotCounts(message.sequences, message.spare_slots)
    config = replace(config, engine=config.engine.model_copy(update={"max_num_seqs": slots.sequences}))
    cache = plan.allocator(device, message.num_blocks, slots, loaded.weight_bytes)()
    table = request_table(config, model, plan.groups, message.context_len)
    inputs = input_builder(config, device, table)
    attention = device.attention(cache, table, model, loaded.dtype, config.engine)
    states = state_caches(cache, table, message.snapshots)
    runner = FollowingRunner(
        model,
        inputs,
        attention,
        device.step_runner(model, inputs, attention, states),
        table,
        Sampler(table, loaded.vocab_size),
        hidden_states(),
        item_encoder(model, cache, config.engine.block_size),
        states=states,
    )
    if device.compiles_kernels:
        warm_up_vision(loaded)
    channel.send(Ready())
    return _Follower(source, loaded, runner, cache, step_profiler(config, groups.placement.rank))


def _connect(groups: RankGroups, rendezvous: Rendezvous, device: Device) -> None:
    with device.activate():
        groups.connect(rendezvous, device.torch_device)


@contextmanager
def _no_progress(_: int) -> Iterator[Progress]:
    yield lambda _: None
