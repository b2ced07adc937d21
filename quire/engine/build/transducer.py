"""Builds scheduler and executor of transducers."""

from __future__ import annotations

import logging

from quire.config.options import EngineOptions
from quire.engine.client.streaming import TransducerInfo
from quire.engine.execution.devices.device import Device
from quire.engine.execution.executor import LocalExecutor
from quire.engine.execution.transducer_runner import TransducerRunner
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.loader import LoadedModel
from quire.engine.models.networks.transducer import TransducerModel
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.streaming_scheduler import frame_budget
from quire.engine.scheduling.transducer_scheduler import TransducerScheduler

logger = logging.getLogger(__name__)
_LEAST_COLUMNS = 50  # of features, in the shortest windows of files: half a second


def build_transducer(
    loaded: LoadedModel, model: TransducerModel, options: EngineOptions, device: Device
) -> tuple[TransducerScheduler, LocalExecutor, int]:
    """The scheduler, the executor, and the most bytes that the states of sequences take.

    As many sequences run as --encoder-cache-memory has room for, but at least one.

    Raises:
        UnsupportedModel: the context has no room for half a second of audio.
    """
    info = loaded.streaming
    assert isinstance(info, TransducerInfo)
    least = -(-_LEAST_COLUMNS // info.columns_per_frame)
    if loaded.context_len < least:
        raise UnsupportedModel(
            f"--max-model-len {loaded.context_len} is too small: this model counts it in frames of audio, and needs at "
            f"least {least}"
        )
    size = model.state_bytes
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
    scheduler = TransducerScheduler(limits, info, by_priority=options.scheduling_policy == "priority")
    return scheduler, LocalExecutor(device.activate, TransducerRunner(model, info)), streams * size
