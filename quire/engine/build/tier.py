"""OpenedTier: the tiers behind an engine's KV cache, as its options have them."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass

from quire.config.options import EngineOptions
from quire.engine.build.cache import CachePlan, reason_against_reading_blocks
from quire.engine.build.core_config import CoreConfig
from quire.engine.core.block_store import BlockStore, DiskStore
from quire.engine.core.host_tier import HostTier
from quire.engine.core.offload import Offload, TierObserver
from quire.engine.execution.cache import OutOfCacheMemory
from quire.engine.execution.devices.device import Device
from quire.engine.execution.host_blocks import HostBlocks
from quire.engine.execution.memory import free_memory
from quire.engine.models.checkpoint.packed_cache import key_of
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.loader import LoadedModel
from quire.engine.models.user_cache import user_cache
from quire.engine.scheduling.tier_blocks import BlockTier, UnsavedBlocks
from quire.engine.tiers.budget import FolderBusy
from quire.engine.tiers.disk import DiskTier
from quire.engine.tiers.worker import TierWorker

logger = logging.getLogger(__name__)
_DIRECTORY = "kv"
_FILES = (".safetensors", ".gguf", ".json")  # that decide what keys and values are
_FORMAT = 1  # of the content of blocks, counted up when the layout of pages changes
_QUEUE = 64 << 20  # bytes that wait to be written, and as many that were read
_PER_STEP = 1 << 20  # bytes that are saved after a step, at least one block, where the core copies them
_PER_STEP_OF_DEVICE = 64 << 20  # where a device copies them beside its steps
_HOST, _DISK = "--kv-offloading-size", "--kv-offloading-disk-size"


@dataclass(frozen=True, slots=True)
class OpenedTier:
    """The tiers of an engine.

    Attributes:
        tier: for the scheduler; store: the same for the core.
        unsaved: an observer of the blocks of each scheduler.
        per_step: bytes that are saved after a step.
    """

    tier: BlockTier
    store: BlockStore
    unsaved: UnsavedBlocks
    block_bytes: int
    per_step: int

    def offload(self, observer: TierObserver | None) -> Offload:
        """Return what copies blocks in the core. `observer`: is told what the tiers have."""
        return Offload(self.store, self.unsaved, self.block_bytes, observer, self.per_step)


def open_tier(
    config: CoreConfig, loaded: LoadedModel, plan: CachePlan, device: Device, *, tracks_changes: bool
) -> OpenedTier | None:
    """Open the tiers of a model; None: there are none. `tracks_changes`: somebody wants to know what they have.

    Raises:
        UnsupportedModel: the folder cannot be used, there is no prefix cache, or the device needs other tiers.
        OutOfCacheMemory: the host has not so much memory.
    """
    options = config.engine
    if not options.kv_offloading_size and not options.kv_offloading_disk_size:
        return None
    if reason := _refusal(options, device):
        raise UnsupportedModel(reason)
    if reason := reason_against_reading_blocks(config, plan):
        logger.warning("%s has no effect: %s", " and ".join(_flags(options)), reason)
        return None
    copies, rows = None, int(options.kv_offloading_size * 2**30) // plan.block_bytes
    if options.kv_offloading_size:
        _check_memory(rows * plan.block_bytes, plan.block_bytes)
        copies = HostBlocks(rows, plan.block_bytes, device.torch_device)
        logger.info("%.2f GiB of host memory keep %d KV blocks", rows * plan.block_bytes / 2**30, rows)
    with ExitStack() as undo:
        if copies is not None:
            undo.callback(copies.close)
        disk = _disk(config, loaded, plan, device, tracks_changes=tracks_changes)
        undo.pop_all()
    if copies is None:
        assert disk is not None
        return OpenedTier(disk, DiskStore(disk), UnsavedBlocks(disk), plan.block_bytes, _PER_STEP)
    host = HostTier(copies, rows, plan.block_bytes, disk, tracks_changes=tracks_changes)
    return OpenedTier(host, host, UnsavedBlocks(host), plan.block_bytes, _PER_STEP_OF_DEVICE)


def _flags(options: EngineOptions) -> list[str]:
    """Return the flags that ask for tiers."""
    sizes = {_HOST: options.kv_offloading_size, _DISK: options.kv_offloading_disk_size}
    return [flag for flag, size in sizes.items() if size]


def _refusal(options: EngineOptions, device: Device) -> str:
    """Return why there are no such tiers; empty: there are."""
    flags = _flags(options)
    if not options.enable_prefix_caching:
        return f"{flags[0]} needs --enable-prefix-caching"
    if _HOST in flags and not device.has_memory:
        return (
            f"{_HOST} is for GPUs: on a CPU the KV cache is in the host's memory. --kv-cache-memory-bytes makes it "
            f"larger, and {_DISK} keeps blocks on the disk"
        )
    if _HOST not in flags and device.has_memory:
        return f"{_DISK} needs {_HOST} on a GPU: blocks come and go through this memory of the host"
    return ""


def _check_memory(nbytes: int, block_bytes: int) -> None:
    """Check that host memory of this size is of use, and there.

    Raises:
        OutOfCacheMemory: it is not.
    """
    if nbytes < 2 * block_bytes:
        raise OutOfCacheMemory(f"{_HOST} has not room for two KV blocks, which take {block_bytes} bytes each")
    if nbytes > (free := free_memory()):
        raise OutOfCacheMemory(f"{_HOST} takes {nbytes} bytes of the host's memory, of which {free} are free")


def _disk(
    config: CoreConfig, loaded: LoadedModel, plan: CachePlan, device: Device, *, tracks_changes: bool
) -> TierWorker | None:
    """Open the files of a model; None: there are none.

    Raises:
        UnsupportedModel: their folder cannot be used.
    """
    options = config.engine
    if not options.kv_offloading_disk_size:
        return None
    try:
        folder = options.kv_offloading_path or user_cache(_DIRECTORY)
        limit = int(options.kv_offloading_disk_size * 2**30)
        tier = DiskTier(folder, _name(config, loaded, plan, device), plan.block_bytes, limit)
    except (OSError, FolderBusy) as error:
        raise UnsupportedModel(f"KV blocks cannot be kept on the disk (--kv-offloading-path): {error}") from error
    logger.info("KV blocks of all models in %s: %.2f of %.2f GiB", folder, tier.nbytes / 2**30, limit / 2**30)
    return TierWorker(tier, plan.block_bytes, _QUEUE, tracks_changes=tracks_changes)


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
