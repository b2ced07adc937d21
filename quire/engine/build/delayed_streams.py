"""Builds scheduler and encoder of models that read audio with each token, and divides memory among them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import cast

from quire.config.options import EngineOptions
from quire.engine.client.streaming import DelayedStreamsInfo
from quire.engine.execution.cache import OutOfCacheMemory
from quire.engine.execution.devices.device import Device
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.states import StateCaches
from quire.engine.execution.streaming_encoder import StreamingCacheSize, StreamingEncoder, streaming_cache_size
from quire.engine.models.loader import LoadedModel
from quire.engine.models.networks.decoder import Decoder
from quire.engine.models.specs.decoder import DecoderSpec
from quire.engine.scheduling.block_tables import BlockGroups
from quire.engine.scheduling.blocks import BlockPool
from quire.engine.scheduling.delayed_streams_scheduler import DelayedStreamsScheduler, largest_piece
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.streaming_scheduler import frame_budget

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DelayedStreams:
    """Configuration of a model that reads a frame of audio with each token.

    Attributes:
        size: size of what the encoder keeps of a sequence outside of the KV cache.
        streams: number of sequences that run at the same time.
    """

    info: DelayedStreamsInfo
    model: Decoder
    size: StreamingCacheSize
    streams: int

    @property
    def nbytes(self) -> int:
        """Bytes that the encoder keeps of all sequences outside of the KV cache."""
        return self.streams * self.size.nbytes

    def largest_piece(self, options: EngineOptions) -> int:
        """Most tokens of a sequence in a step."""
        return largest_piece(self._limits(options, 0))

    def check_context(self, context_len: int) -> None:
        """Check that there is room for audio.

        Raises:
            OutOfCacheMemory: the context has none.
        """
        silence = self.info.silent_frames
        if context_len <= silence:
            raise OutOfCacheMemory(
                f"the context has room for {context_len} frames, {silence} of which are the silence around the audio: "
                "raise --max-model-len or --kv-cache-memory-bytes"
            )

    def encoder(self, device: Device, table: RequestTable, states: StateCaches) -> StreamingEncoder:
        """The encoder of audio."""
        assert self.model.encoder is not None
        return StreamingEncoder(self.model.encoder, device, self.size, table, states, self.model.stem_state)

    def scheduler(
        self, options: EngineOptions, groups: BlockGroups, context_len: int, num_blocks: int
    ) -> DelayedStreamsScheduler:
        """The scheduler. `groups`: the groups of layers that take blocks."""
        return DelayedStreamsScheduler(
            self._limits(options, context_len),
            BlockPool(num_blocks, options.block_size),
            groups,
            columns_per_frame=self.info.columns_per_frame,
            by_priority=options.scheduling_policy == "priority",
        )

    def _limits(self, options: EngineOptions, context_len: int) -> SchedulerLimits:
        return SchedulerLimits(
            max_num_seqs=self.streams,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=context_len,
            encoder_compute_budget=frame_budget(options.max_num_batched_tokens),
        )


def delayed_streams_of(loaded: LoadedModel, options: EngineOptions, device: Device) -> DelayedStreams | None:
    """The configuration of a model that reads a frame of audio with each token; None for others.

    As many sequences run as --encoder-cache-memory has room for, but at least one.
    """
    if not isinstance(loaded.streaming, DelayedStreamsInfo):
        return None
    model = cast("Decoder", loaded.model)
    spec = cast("DecoderSpec", model.spec)
    assert spec.encoder is not None
    size = streaming_cache_size(spec.encoder, spec.hidden, options.block_size, loaded.dtype, device.cache_alignment)
    streams = max(1, min(options.max_num_seqs, int(options.encoder_cache_memory) // size.nbytes))
    if options.speculative_method != "none":
        logger.warning("--speculative-method has no effect: the model reads audio with each token that it generates")
    if streams < options.max_num_seqs:
        logger.info(
            "%d sequences run at the same time: an encoder takes %d MiB of --encoder-cache-memory",
            streams,
            size.nbytes >> 20,
        )
    return DelayedStreams(loaded.streaming, model, size, streams)
