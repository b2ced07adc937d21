"""KV caches: the memory of all blocks, and how many of them fit."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from quire.config.options import EngineOptions
from quire.engine.execution.cache_layout import CacheLayout, LayerCache, LayerStates

_PREFAULT_BYTES = 8 << 20  # at a time


class OutOfCacheMemory(Exception):
    """The KV cache that fits into memory is too small for one request."""


class KVCache(Protocol):
    """The pages of all layers.

    Attributes:
        layers: the pages of each layer, by its index.
        states: the states of each layer that has some.
    """

    layers: Mapping[int, LayerCache]
    states: Mapping[int, LayerStates]

    def ensure_mapped(self, block: int) -> None:
        """Back a block, and all before it, with memory; called before a step writes to it."""

    def read(self, block: int) -> bytes:
        """Return a copy of a block, which steps have written."""

    def write(self, block: int, content: bytes) -> None:
        """Fill a block with what `read` has returned."""

    def prefault(self) -> bool:
        """Back some more blocks with memory ahead of time; returns whether there are more. Called while idle."""


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Memory that a KV cache may take.

    Attributes:
        setting: the flag that raises it.
        step_bytes: memory of intermediate results of the largest step, where it was measured.
    """

    nbytes: int
    setting: str
    step_bytes: int = 0


def count_blocks(
    options: EngineOptions, bytes_per_block: int, blocks_per_sequence: int, available: CacheMemory | None
) -> int:
    """Number of blocks to allocate: as configured, or as much as memory and the largest possible need allow.

    Args:
        options: number of sequences, and memory if it is configured.
        bytes_per_block: bytes of a block.
        blocks_per_sequence: the most that one sequence takes.
        available: the memory that the KV cache may take; None: as --kv-cache-memory-bytes says.

    Raises:
        OutOfCacheMemory: not even one block fits.
    """
    if available is None:
        memory, advice = int(options.kv_cache_memory_bytes or 0), "raise --kv-cache-memory-bytes"
    else:
        max_needed = options.max_num_seqs * blocks_per_sequence
        memory = min(available.nbytes, max_needed * bytes_per_block)
        advice = f"free some memory or raise {available.setting}"
    blocks = memory // bytes_per_block
    if blocks < 1:
        raise OutOfCacheMemory(
            f"there is not enough memory for one KV block: it needs {bytes_per_block} bytes, "
            f"{memory} are available; {advice}"
        )
    return blocks


class DeviceKVCache(KVCache):
    """Pages of all layers in one allocation of a device's memory, zero at first. Those of a layer are adjacent."""

    def __init__(
        self, layout: CacheLayout, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate the memory.

        Raises:
            OutOfCacheMemory: the device has not enough.
        """
        nbytes = num_blocks * layout.block_bytes(block_size, dtype)
        try:
            memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise OutOfCacheMemory(
                f"the {nbytes} bytes of the KV cache cannot be allocated: "
                "lower --kv-cache-memory-bytes or --gpu-memory-utilization"
            ) from error
        self.layers, self.states = layout.divide(memory, num_blocks, block_size, dtype, by_place=True)
        sizes = layout.place_bytes(block_size, dtype)
        parts = memory.split([num_blocks * size for size in sizes])
        self._places = [part.view(num_blocks, size) for part, size in zip(parts, sizes, strict=True)]

    @override
    def ensure_mapped(self, block: int) -> None:
        pass  # all memory is mapped when it is allocated

    @override
    def read(self, block: int) -> bytes:
        return torch.cat([place[block] for place in self._places]).cpu().numpy().tobytes()

    @override
    def write(self, block: int, content: bytes) -> None:
        begin = 0
        for place in self._places:
            part = np.frombuffer(content, np.uint8, place.shape[1], begin)
            place[block].copy_(torch.from_numpy(part.copy()))
            begin += place.shape[1]

    @override
    def prefault(self) -> bool:
        return False


class HostKVCache(KVCache):
    """Pages of all layers in one allocation of host memory, zero at first.

    All layers of a block are adjacent, head by head, so that few pages of memory are touched for a block. The system
    maps memory when it is first written, which takes seconds per GB on a virtual machine. So it is written ahead of
    its use: some blocks at a time, by all threads, and more of them while the engine is idle.
    """

    def __init__(
        self, layout: CacheLayout, num_blocks: int, block_size: int, dtype: torch.dtype, prefault: int = 0
    ) -> None:
        """`prefault`: bytes to keep mapped ahead of the blocks in use, while idle."""
        per_block = layout.block_bytes(block_size, dtype)
        memory = _lazy_zeros(num_blocks * per_block)
        self._blocks = memory.view(num_blocks, per_block)
        self._stride = max(1, _PREFAULT_BYTES // per_block)
        self._ahead = prefault // per_block
        self._used = self._mapped = 0  # blocks that were written to, and that are mapped; both count from the first
        self.layers, self.states = layout.divide(memory, num_blocks, block_size, dtype, by_place=False)

    @override
    def ensure_mapped(self, block: int) -> None:
        self._used = max(self._used, block + 1)
        if self._used > self._mapped:
            self._map(self._used + self._stride)

    @override
    def read(self, block: int) -> bytes:
        return self._blocks[block].numpy().tobytes()

    @override
    def write(self, block: int, content: bytes) -> None:
        self.ensure_mapped(block)
        self._blocks[block].numpy()[:] = np.frombuffer(content, np.uint8)

    @override
    def prefault(self) -> bool:
        target = min(self._used + self._ahead, len(self._blocks))
        if self._mapped < target:
            self._map(self._mapped + self._stride)
        return self._mapped < target

    def _map(self, end: int) -> None:
        self._blocks[self._mapped : end].zero_()
        self._mapped = min(end, len(self._blocks))


def _lazy_zeros(size: int) -> Tensor:
    """Bytes whose memory is not resident until it is written; in huge pages, for fewer page faults and TLB misses."""
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise OutOfCacheMemory(
            f"the {size} bytes of the KV cache cannot be allocated: lower --kv-cache-memory-bytes"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
