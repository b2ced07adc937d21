"""CachePlan: layout and data type of a rank's KV cache; the memory that it may take."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch

from quire.config.options import EngineOptions
from quire.engine.build.core_config import CoreConfig
from quire.engine.build.encoder_memory import cached_embeddings, embedding_bytes, encode_largest_picture
from quire.engine.execution.attention.libraries import LIBRARIES
from quire.engine.execution.cache import CacheMemory, KVCache, count_slots
from quire.engine.execution.cache_layout import CacheLayout
from quire.engine.execution.devices.device import Device
from quire.engine.execution.memory import MemoryShare, free_memory
from quire.engine.execution.profile import run_largest_step
from quire.engine.execution.runner import LOGITS_CHUNK
from quire.engine.execution.state_slots import slot_bytes
from quire.engine.models.config.quantization import cache_scheme
from quire.engine.models.distributed.placement import Placement
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.loader import LoadedModel
from quire.engine.models.networks.decoder import LanguageModel
from quire.engine.models.networks.transformer import Transformer
from quire.engine.models.sharding.cache_scales import check_scales
from quire.engine.models.sharding.decoder import ShardedDecoder
from quire.engine.models.specs.decoder import DecoderSpec
from quire.engine.scheduling.block_tables import BlockGroups
from quire.engine.scheduling.state_snapshots import SnapshotStore
from quire.kernels import gpu

logger = logging.getLogger(__name__)
_FLOAT8 = "fp8"  # float8_e4m3
_AHEAD = 32 << 20  # bytes of a small model's cache that are mapped before they are used
_MOST_SNAPSHOT_BYTES = 4 << 30  # by default
_MOST_SNAPSHOTS = 1 << 16  # what is known of each takes about a kilobyte
_RARE_DISTANCE = 64  # tokens between the snapshots of an answer, where these cost more
_DRAFT_SLOTS = 8  # sequences of a step whose drafts can be verified: a draft step copies a state of megabytes for each


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """Slots of states.

    Attributes:
        sequences: the most sequences that run at the same time; in models without states there are no slots for them.
        spare: slots for the states behind drafts: as many sequences of a step have one.
    """

    sequences: int
    spare: int

    @property
    def total(self) -> int:
        """All slots."""
        return self.sequences + self.spare


@dataclass(frozen=True, slots=True)
class CachePlan:
    """How a rank keeps keys, values and states.

    Attributes:
        groups: what the scheduler knows of the layout.
    """

    layout: CacheLayout
    dtype: torch.dtype
    block_size: int
    groups: BlockGroups

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.layout.block_bytes(self.block_size, self.dtype)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the states of a sequence."""
        return slot_bytes(self.layout.states)

    def most_blocks(self, length: int, step: int) -> int:
        """Return the most blocks of a sequence; see `BlockGroups.most_blocks`."""
        return self.groups.most_blocks(length, step, self.block_size)

    def count_slots(self, options: EngineOptions, length: int, step: int, available: CacheMemory | None) -> SlotCounts:
        """Return how many sequences have slots for their states, and how many slots are spare.

        Args:
            options: the most sequences, and whether they have drafts.
            length: tokens of the longest sequence; step: the most of them that one step computes.
            available: see `count_slots`.

        Raises:
            OutOfCacheMemory: there is no memory for one.
        """
        if not self.slot_bytes:
            return SlotCounts(options.max_num_seqs, 0)
        drafts = _DRAFT_SLOTS if options.speculative_method == "ngram" and options.num_speculative_tokens else 0
        page_bytes = self.most_blocks(length, step) * self.block_bytes
        count = count_slots(options, self.slot_bytes, page_bytes, available, drafts)
        spare = min(drafts, count // 2)
        return SlotCounts(min(options.max_num_seqs, count - spare), spare)

    def allocator(self, device: Device, blocks: int, slots: SlotCounts, weight_bytes: int) -> Callable[[], KVCache]:
        """Return a function that allocates the KV cache, and does not hold the model."""
        prefault = min(max(_AHEAD, weight_bytes // 16), blocks * self.block_bytes // 4)
        return partial(device.allocate_cache, self.layout, blocks, self.block_size, self.dtype, prefault, slots.total)


def plan_cache(loaded: LoadedModel, config: CoreConfig, device: Device) -> CachePlan:
    """Return the plan of this rank.

    Raises:
        UnsupportedModel: see `_cache_dtype`.
    """
    model, size = cast("LanguageModel", loaded.model), config.engine.block_size
    # A plan of FlashInfer has one block table for all layers; without a context no window is shorter.
    context_len = 0 if config.engine.attention_backend == "flashinfer" else loaded.context_len
    shapes = {
        layer: replace(shape, alignment=device.cache_alignment, row_alignment=device.row_alignment)
        for layer, shape in model.caches.items()
    }
    layout, dtype = CacheLayout(shapes, model.cache_groups(context_len)), _cache_dtype(loaded, config)
    transfer = config.engine.kv_transfer
    kept_blocks = int(transfer is not None and transfer.sends)
    return CachePlan(layout, dtype, size, BlockGroups(layout.windows, layout.has_states, kept_blocks))


def snapshot_bytes(options: EngineOptions, plan: CachePlan, available: CacheMemory | None) -> int:
    """Return the bytes of the host's memory in which states are saved.

    `available`: the memory for the KV cache; None where its size is configured.
    """
    if not plan.groups.has_states or not options.enable_prefix_caching:
        return 0
    if options.state_snapshot_memory is not None:
        return int(options.state_snapshot_memory)
    nbytes = int(options.kv_cache_memory_bytes or 0) if available is None else available.nbytes
    return min(_MOST_SNAPSHOT_BYTES, nbytes // 4)


def snapshot_store(options: EngineOptions, nbytes: int, size: int, *, is_host: bool) -> SnapshotStore | None:
    """Return the places for snapshots; None: there are none, so states are not saved.

    Args:
        options: whether there are drafts, whose steps end anywhere.
        nbytes: of the memory for them.
        size: bytes of the states of a sequence.
        is_host: the states are in the host's memory, where a copy of them takes little time.
    """
    places = min(_MOST_SNAPSHOTS, nbytes // size) if size else 0
    if not places:
        return None
    rarely = options.speculative_method != "none" or not is_host
    distance = _RARE_DISTANCE if rarely else 1
    return SnapshotStore(places, size, max(1, distance // options.block_size))


def reason_against_reading_blocks(config: CoreConfig, plan: CachePlan) -> str:
    """Return why the core does not read and write the blocks of its cache itself; empty: it does."""
    if config.parallel.ranks > 1:
        return "the KV blocks of several ranks are not read"
    if plan.groups.has_states:
        return "the model has states, without which its blocks are of no use"
    return ""


def with_cache_dtype(config: CoreConfig, device: Device) -> CoreConfig:
    """The configuration with the data type of this model's KV cache: `auto` is what the checkpoint was made for.

    The device is active.

    Raises:
        UnsupportedModel: it has no kernels for such caches.
    """
    dtype, computes = config.engine.kv_cache_dtype, gpu.computes_float8(device.torch_device)
    if dtype == _FLOAT8 and not computes:
        raise UnsupportedModel(
            "--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 or more; auto and int8 are accepted here"
        )
    scheme = cache_scheme(config.model_config.quantization)
    if dtype != "auto" or scheme is None or not isinstance(config.model_config.spec, DecoderSpec):
        return config
    if scheme == _FLOAT8 and computes and config.engine.attention_backend not in LIBRARIES:
        return replace(config, engine=config.engine.model_copy(update={"kv_cache_dtype": _FLOAT8}))
    logger.info("%s was made for a KV cache of %s, which is not used here", config.folder.name, scheme)
    return config


def _cache_dtype(loaded: LoadedModel, config: CoreConfig) -> torch.dtype:
    """Data type of the KV cache.

    Raises:
        UnsupportedModel: it cannot represent the checkpoint's scales, or the model runs in another type.
    """
    kv_cache_dtype = config.engine.kv_cache_dtype
    if kv_cache_dtype in ("bfloat16", "float16") and loaded.dtype != getattr(torch, kv_cache_dtype):
        raise UnsupportedModel(
            f"--kv-cache-dtype {kv_cache_dtype} needs a model that runs in {kv_cache_dtype} (--dtype), this one runs "
            f"in {str(loaded.dtype).removeprefix('torch.')}; auto and int8 are accepted here"
        )
    if kv_cache_dtype == _FLOAT8 and isinstance(loaded.model, Transformer):
        check_scales(loaded.model)
    return {"int8": torch.int8, _FLOAT8: torch.float8_e4m3fn}.get(kv_cache_dtype, loaded.dtype)


def cache_memory(loaded: LoadedModel, config: CoreConfig, device: Device, reserved: int) -> CacheMemory | None:
    """The memory that this rank's KV cache may take; None where its size is configured.

    `reserved`: bytes that the engine needs for other state.
    """
    options, model = config.engine, cast("LanguageModel", loaded.model)
    if options.kv_cache_memory_bytes is not None:
        return None
    placement, share = Placement.of(config.parallel), config.memory_share
    if placement.ranks > 1 and device.torch_device.type == "cpu":
        share = MemoryShare(host_memory(config))
    elif share is not None:
        share = replace(share, weights=share.weights // placement.ranks)
    if isinstance(model, ShardedDecoder) and placement.stages > 1:
        reserved += _bytes_in_flight(model, config, loaded.dtype)
    reserved += device.attention_bytes(model, options, loaded.context_len)
    reserved += cached_embeddings(loaded, options) * embedding_bytes(loaded)

    def largest_step() -> None:
        model.set_context(loaded.context_len)
        encode_largest_picture(loaded, options)
        run_largest_step(
            model, options.max_num_batched_tokens, options.max_num_seqs, loaded.context_len, device.torch_device
        )

    return device.cache_memory(options, share, reserved, largest_step)


def host_memory(config: CoreConfig) -> int:
    """Return the bytes of the host's memory that this rank may take, beside weights."""
    share, ranks = config.memory_share, config.parallel.local_ranks
    return (free_memory() if share is None else share.host_bytes) // ranks


def _bytes_in_flight(model: ShardedDecoder, config: CoreConfig, dtype: torch.dtype) -> int:
    """Bytes that a rank of a pipeline holds while steps are in flight, beside those of its largest step.

    As many steps as there are stages are in flight. Links keep what they send until it has arrived.
    """
    options, placement = config.engine, model.placement
    nbytes = (placement.stages - 1) * options.max_num_batched_tokens * model.spec.hidden * dtype.itemsize
    if placement.rank == placement.logits_rank:
        rows = max(options.max_num_seqs, LOGITS_CHUNK)
        nbytes += placement.stages * rows * model.whole.vocab * torch.float32.itemsize
    return nbytes
