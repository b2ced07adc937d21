"""OpenedTier: the second tier of an engine's prefix cache, as its options have it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from quire.config.options import EngineOptions
from quire.engine.build.cache import CachePlan, reason_against_reading_blocks
from quire.engine.build.core_config import CoreConfig
from quire.engine.core.offload import Offload, TierObserver
from quire.engine.execution.devices.device import Device
from quire.engine.models.checkpoint.packed_cache import key_of
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.loader import LoadedModel
from quire.engine.models.user_cache import user_cache
from quire.engine.scheduling.tier_blocks import UnsavedBlocks
from quire.engine.tiers.budget import FolderBusy
from quire.engine.tiers.disk import DiskTier
from quire.engine.tiers.worker import TierWorker

logger = logging.getLogger(__name__)
_DIRECTORY = "kv"
_FILES = (".safetensors", ".gguf", ".json")  # that decide what keys and values are
_FORMAT = 1  # of the content of blocks, counted up when the layout of pages changes
_QUEUE = 64 << 20  # bytes that wait to be written, and as many that were read


@dataclass(frozen=True, slots=True)
class OpenedTier:
    """A tier with its thread.

    Attributes:
        unsaved: an observer of the blocks of each scheduler.
    """

    worker: TierWorker
    unsaved: UnsavedBlocks
    block_bytes: int

    def offload(self, observer: TierObserver | None) -> Offload:
        """Return what copies blocks in the core. `observer`: is told what the tier has."""
        return Offload(self.worker, self.unsaved, self.block_bytes, observer)


def open_tier(
    config: CoreConfig, loaded: LoadedModel, plan: CachePlan, device: Device, *, tracks_changes: bool
) -> OpenedTier | None:
    """Open the tier of a model; None: there is none. `tracks_changes`: somebody wants to know what it has.

    Raises:
        UnsupportedModel: its folder cannot be used, or there is no prefix cache.
    """
    options = config.engine
    if not options.kv_offloading_size:
        return None
    if not options.enable_prefix_caching:
        raise UnsupportedModel("--kv-offloading-size needs --enable-prefix-caching")
    if reason := reason_against_reading_blocks(config, plan, device):
        logger.warning("--kv-offloading-size has no effect: %s", reason)
        return None
    try:
        folder = options.kv_offloading_path or user_cache(_DIRECTORY)
        limit = int(options.kv_offloading_size * 2**30)
        tier = DiskTier(folder, _name(config, loaded, plan, device), plan.block_bytes, limit)
    except (OSError, FolderBusy) as error:
        raise UnsupportedModel(f"KV blocks cannot be kept on the disk (--kv-offloading-path): {error}") from error
    logger.info("KV blocks of all models in %s: %.2f of %.2f GiB", folder, tier.nbytes / 2**30, limit / 2**30)
    worker = TierWorker(tier, plan.block_bytes, _QUEUE, tracks_changes=tracks_changes)
    return OpenedTier(worker, UnsavedBlocks(worker), plan.block_bytes)


def _name(config: CoreConfig, loaded: LoadedModel, plan: CachePlan, device: Device) -> str:
    """Return a name that only engines have whose blocks have the same bytes for the same tokens."""
    files = sorted(path for path in config.folder.iterdir() if path.suffix in _FILES)
    options: EngineOptions = config.engine
    return key_of(
        files,
        _FORMAT,
        type(loaded.model).__name__,
        loaded.context_len,
        str(loaded.dtype),
        config.model.model_dump_json(exclude={"max_model_len", "packed_weight_cache_size", "revision", "model_hub"}),
        str(plan.dtype),
        plan.block_size,
        plan.layout,
        options.prefix_caching_hash_algo,
        (device.name, device.description),
    )
