"""KV caches: the memory of all blocks, and how many of them fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from quire.config.options import EngineOptions
from quire.engine.execution.cache_layout import CacheLayout, LayerCache
from quire.engine.execution.state_slots import StateSlots, slot_bytes
from quire.kernels.huge_pages import map_huge_pages

_PREFAULT_BYTES = 8 << 20  # at a time


class OutOfCacheMemory(Exception):
    """The KV cache that fits into memory is too small for one request."""


class KVCache(Protocol):
    """The pages of all layers, and the states of those that have some.

    Attributes:
        layers: the pages of each layer, by its index.
        states: the states of sequences; None where no layer has some.
        layout: how layers share the blocks.
    """

    layout: CacheLayout
    layers: Mapping[int, LayerCache]
    states: StateSlots | None

    def ensure_mapped(self, block: int) -> None:
        """Back a block, and all before it, with memory; called before a step writes to it."""

    def read(self, block: int) -> bytes:
        """Return a copy of a block, which steps have written."""

    def write(self, block: int, content: bytes) -> None:
        """Fill a block with what `read` has returned."""

    def copy_out(self, block: int, target: Tensor) -> None:
        """Copy a block to bytes in host memory, on the current stream of the device."""

    def copy_in(self, block: int, source: Tensor) -> None:
        """Fill a block with bytes in host memory, on the current stream of the device."""

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
    options: EngineOptions,
    bytes_per_block: int,
    blocks_per_sequence: int,
    available: CacheMemory | None,
    state_bytes: int = 0,
) -> int:
    """Number of blocks to allocate: as configured, or as much as memory and the largest possible need allow.

    Args:
        options: number of sequences, and memory if it is configured.
        bytes_per_block: bytes of a block; 0: the rank's layers have states alone, which limit no blocks. A model
            without pages has as many blocks as sequences.
        blocks_per_sequence: the most that one sequence takes.
        available: the memory that the KV cache may take; None: as --kv-cache-memory-bytes says.
        state_bytes: part of it that the slots of states take.

    Raises:
        OutOfCacheMemory: not even one block fits.
    """
    if not bytes_per_block:
        return options.max_num_seqs * max(1, blocks_per_sequence)
    memory, advice = _memory(options, available)
    memory -= state_bytes
    if available is not None:
        memory = min(memory, options.max_num_seqs * blocks_per_sequence * bytes_per_block)
    blocks = memory // bytes_per_block
    if blocks < 1:
        beside = f" beside {state_bytes} bytes of states" if state_bytes else ""
        raise OutOfCacheMemory(
            f"there is not enough memory for one KV block: it needs {bytes_per_block} bytes, "
            f"{memory} are available{beside}; {advice}"
        )
    return blocks


def count_slots(
    options: EngineOptions, bytes_per_slot: int, page_bytes: int, available: CacheMemory | None, spare: int = 0
) -> int:
    """Number of slots of states to allocate: one for each sequence and the spare ones, or as many as fit.

    As many fit as there is memory for with all pages that a sequence can need. If these are fewer, slots may take half
    of the memory: most sequences are shorter than the longest.

    Args:
        options: number of sequences, and memory if it is configured.
        bytes_per_slot: bytes of a slot; 0: the model has no states.
        page_bytes: bytes of the most blocks that one sequence takes.
        available: the memory that pages and states may take; None: as --kv-cache-memory-bytes says.
        spare: slots beside those of sequences.

    Raises:
        OutOfCacheMemory: not even one slot fits.
    """
    if not bytes_per_slot:
        return options.max_num_seqs
    memory, advice = _memory(options, available)
    if bytes_per_slot > memory:
        raise OutOfCacheMemory(
            f"there is not enough memory for the states of one sequence: they need {bytes_per_slot} bytes, "
            f"{memory} are available; {advice}"
        )
    fitting = max(1, memory // (bytes_per_slot + page_bytes), memory // 2 // bytes_per_slot)
    return min(options.max_num_seqs + spare, fitting)


def _memory(options: EngineOptions, available: CacheMemory | None) -> tuple[int, str]:
    """Return the bytes that a KV cache may take, and what to do if these are too few."""
    if available is None:
        return int(options.kv_cache_memory_bytes or 0), "raise --kv-cache-memory-bytes"
    return available.nbytes, f"free some memory or raise {available.setting}"


class DeviceKVCache(KVCache):
    """Pages of all layers in one allocation of a device's memory, zero at first. Those of a layer are adjacent."""

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        slots: int = 0,
    ) -> None:
        """Allocate the memory. `slots`: those of states.

        Raises:
            OutOfCacheMemory: the device has not enough.
        """
        nbytes = num_blocks * layout.block_bytes(block_size, dtype)
        try:
            memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            self.states = _states(layout, slots, partial(torch.zeros, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError as error:
            raise OutOfCacheMemory(
                f"the {nbytes} bytes of the KV cache cannot be allocated: "
                "lower --kv-cache-memory-bytes or --gpu-memory-utilization"
            ) from error
        self.layout = layout
        self.layers = layout.divide(memory, num_blocks, block_size, dtype, by_place=True)
        sizes = layout.place_bytes(block_size, dtype)
        parts = memory.split([num_blocks * size for size in sizes])
        self._places = [part.view(num_blocks, size) for part, size in zip(parts, sizes, strict=True)]

    @override
    def ensure_mapped(self, block: int) -> None:
        pass  # all memory is mapped when it is allocated

    @override
    def read(self, block: int) -> bytes:
        return self._joined(block).cpu().numpy().tobytes()

    @override
    def write(self, block: int, content: bytes) -> None:
        self.copy_in(block, torch.from_numpy(np.frombuffer(content, np.uint8).copy()))

    @override
    def copy_out(self, block: int, target: Tensor) -> None:
        target.copy_(self._joined(block), non_blocking=True)

    @override
    def copy_in(self, block: int, source: Tensor) -> None:
        joined = source.to(self._places[0].device, non_blocking=True)
        parts = joined.split([place.shape[1] for place in self._places])
        torch._foreach_copy_([place[block] for place in self._places], list(parts))

    def _joined(self, block: int) -> Tensor:
        """Return a copy of a block in the device's memory: one copy to the host is faster than one for each place."""
        return torch.cat([place[block] for place in self._places])

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
        self,
        layout: CacheLayout,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        prefault: int = 0,
        slots: int = 0,
    ) -> None:
        """Reserve the memory.

        Args:
            layout: how blocks are divided.
            num_blocks: blocks of the pages.
            block_size: tokens of a block.
            dtype: of the elements of pages.
            prefault: bytes to keep mapped ahead of the blocks in use, while idle.
            slots: those of states.
        """
        per_block = layout.block_bytes(block_size, dtype)
        memory = lazy_zeros(num_blocks * per_block)
        self._blocks = memory.view(num_blocks, per_block)
        self._stride = max(1, _PREFAULT_BYTES // max(1, per_block))
        self._ahead = prefault // max(1, per_block)
        self._used = self._mapped = 0  # blocks that were written to, and that are mapped; both count from the first
        self.layout = layout
        self.layers = layout.divide(memory, num_blocks, block_size, dtype, by_place=False)
        self.states = _states(layout, slots, lazy_zeros)

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
    def copy_out(self, block: int, target: Tensor) -> None:
        target.copy_(self._blocks[block])

    @override
    def copy_in(self, block: int, source: Tensor) -> None:
        self.ensure_mapped(block)
        self._blocks[block].copy_(source)

    @override
    def prefault(self) -> bool:
        target = min(self._used + self._ahead, len(self._blocks))
        if self._mapped < target:
            self._map(self._mapped + self._stride)
        return self._mapped < target

    def _map(self, end: int) -> None:
        self._blocks[self._mapped : end].zero_()
        self._mapped = min(end, len(self._blocks))


def _states(layout: CacheLayout, slots: int, zeros: Callable[[int], Tensor]) -> StateSlots | None:
    """Allocate the states of layers. `zeros`: returns so many bytes."""
    kinds = layout.states
    if not kinds or not slots:
        return None
    return StateSlots(zeros(slots * slot_bytes(kinds)).view(slots, -1), kinds)


def lazy_zeros(size: int, advice: str = "lower --kv-cache-memory-bytes") -> Tensor:
    """Bytes whose memory is not resident until it is written; in huge pages, for fewer page faults and TLB misses.

    Raises:
        OutOfCacheMemory: so much cannot be reserved. `advice`: what to do then.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    try:
        return map_huge_pages(size)
    except (OSError, OverflowError) as error:
        raise OutOfCacheMemory(f"{size} bytes of the KV cache cannot be allocated: {advice}") from error
