"""Builds scheduler and executor of transducers."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from quire.config.options import EngineOptions
from quire.engine.build.cache import CachePlan, SlotCounts
from quire.engine.client.streaming import TransducerInfo
from quire.engine.execution.cache import OutOfCacheMemory
from quire.engine.execution.cache_layout import CacheLayout
from quire.engine.execution.devices.device import Device
from quire.engine.execution.executor import LocalExecutor
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.state_slots import StateSlots
from quire.engine.execution.transducer_runner import TransducerRunner
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.loader import LoadedModel
from quire.engine.models.networks.transducer import TransducerModel
from quire.engine.scheduling.block_tables import BlockGroups
from quire.engine.scheduling.blocks import BlockPool
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.streaming_scheduler import frame_budget
from quire.engine.scheduling.transducer_scheduler import TransducerScheduler

logger = logging.getLogger(__name__)
_LEAST_COLUMNS = 50  # of features, in the shortest windows of files: half a second


@dataclass(frozen=True, slots=True)
class BuiltTransducer:
    """The parts of a transducer's engine, and the memory of all states."""

    scheduler: TransducerScheduler
    executor: LocalExecutor
    num_blocks: int
    cache_bytes: int


def build_transducer(
    loaded: LoadedModel, model: TransducerModel, options: EngineOptions, device: Device
) -> BuiltTransducer:
    """Build the engine of a transducer.

    As many sequences run as --encoder-cache-memory has room for, but at least one. The memory of their states is
    allocated here.

    Raises:
        UnsupportedModel: the context has no room for half a second of audio.
        OutOfCacheMemory: there is no memory for the states.
    """
    info = loaded.streaming
    assert isinstance(info, TransducerInfo)
    _check_context(loaded.context_len, info)
    plan = _plan(model, options, loaded.dtype)
    size = plan.slot_bytes
    streams = max(1, min(options.max_num_seqs, int(options.encoder_cache_memory) // size))
    if streams < options.max_num_seqs:
        logger.info(
            "%d sequences run at the same time: a state takes %d KiB of --encoder-cache-memory", streams, size >> 10
        )
    limits = SchedulerLimits(
        max_num_seqs=streams,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=loaded.context_len,
        encoder_compute_budget=frame_budget(options.max_num_batched_tokens),
    )
    pool, by_priority = BlockPool(streams, plan.block_size), options.scheduling_policy == "priority"
    scheduler = TransducerScheduler(limits, pool, plan.groups, info, by_priority=by_priority)
    slots = _allocate(plan, streams, device)
    table = RequestTable(streams, 0, plan.block_size, windows=())
    executor = LocalExecutor(device.activate, TransducerRunner(model, info, slots, table))
    return BuiltTransducer(scheduler, executor, streams, streams * size)


def _check_context(context_len: int, info: TransducerInfo) -> None:
    least = -(-_LEAST_COLUMNS // info.columns_per_frame)
    if context_len < least:
        raise UnsupportedModel(
            f"--max-model-len {context_len} is too small: this model counts it in frames of audio, and needs at "
            f"least {least}"
        )


def _plan(model: TransducerModel, options: EngineOptions, dtype: torch.dtype) -> CachePlan:
    """The plan of a cache that has states alone."""
    layout = CacheLayout({}, model.cache_groups())
    return CachePlan(layout, dtype, options.block_size, BlockGroups((), has_states=True))


def _allocate(plan: CachePlan, streams: int, device: Device) -> StateSlots:
    try:
        slots = plan.allocator(device, streams, SlotCounts(streams, 0), 0)().states
    except OutOfCacheMemory as error:
        raise OutOfCacheMemory(
            f"the {streams * plan.slot_bytes} bytes of the states of sequences cannot be allocated: "
            "lower --encoder-cache-memory or --max-num-seqs"
        ) from error
    assert slots is not None
    return slots
