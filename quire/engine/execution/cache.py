"""The KV tensors of all layers, and how many blocks of them fit into memory."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.config.options import EngineOptions
from quire.engine.execution.memory import free_memory
from quire.engine.models.decoder import CacheShape
from quire.kernels.int8_pages import SCALE

_FOUND_AT_ONCE = 8 << 20  # bytes


class OutOfCacheMemory(Exception):
    """The KV cache that memory allows is too small for what it has to hold."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Pages of one layer, each (heads, blocks, block_size, dim) and with gaps. `values` may be a view of `keys`.

    Pages of int8 hold a scale before each row's numbers.
    """

    keys: Tensor
    values: Tensor


def block_bytes(shapes: Sequence[CacheShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return _per_token(shapes, dtype) * block_size * dtype.itemsize


def _per_token(shapes: Sequence[CacheShape], dtype: torch.dtype) -> int:
    """Numbers of a token over all layers, and the bytes of its scales."""
    return sum(shape.numbers + shape.rows * _front(dtype) for shape in shapes)


def _front(dtype: torch.dtype) -> int:
    return SCALE if dtype is torch.int8 else 0


def count_blocks(options: EngineOptions, bytes_per_block: int, context_len: int, share: int | None = None) -> int:
    """How many blocks to allocate: as told, or as free memory and the largest possible need allow.

    `share`: bytes that this engine may take of the memory it shares with other engines; none if it is alone.

    Raises:
        OutOfCacheMemory: not even one block fits.
    """
    if options.kv_cache_memory is not None:
        blocks = int(options.kv_cache_memory) // bytes_per_block
        advice = "--kv-cache-memory must be larger"
    else:
        available = (free_memory() if share is None else share) * options.memory_fraction
        most_needed = options.max_num_seqs * -(-context_len // options.block_size)
        blocks = min(int(available) // bytes_per_block, most_needed)
        advice = "free some memory or raise --memory-fraction"
    if blocks < 1:
        raise OutOfCacheMemory(f"no KV block of {bytes_per_block} bytes fits: {advice}")
    return blocks


class KVCache:
    """Empty pages of all layers, in one piece of memory.

    What all layers hold of a block lies side by side, head by head: few of the system's pages are touched for it. The
    system finds memory when it is first written, which on a virtual machine takes long (seconds per GB were seen). So
    it is written ahead of its use: some blocks at a time, by all threads, and more while nothing else is to be done.

    Attributes:
        layers: the pages of each layer.
    """

    def __init__(
        self, shapes: Sequence[CacheShape], num_blocks: int, block_size: int, dtype: torch.dtype, reserve: int = 0
    ) -> None:
        """`reserve`: bytes to find memory for while nothing else is to be done."""
        per_block = _per_token(shapes, dtype) * block_size
        self._blocks = _untouched(num_blocks * per_block * dtype.itemsize, dtype).view(num_blocks, per_block)
        self._stride = max(1, _FOUND_AT_ONCE // (per_block * dtype.itemsize))
        self._reserve = reserve // (per_block * dtype.itemsize)
        self._reached = self._found = 0  # blocks that were used, and those that have memory; the first ones come first
        self.layers: list[LayerCache] = []
        offset = 0

        def pages(heads: int, dim: int) -> Tensor:
            nonlocal offset
            size, strides = (heads, num_blocks, block_size, dim), (block_size * dim, per_block, dim, 1)
            made = self._blocks.as_strided(size, strides, offset)
            offset += heads * block_size * dim
            return made

        for shape in shapes:
            key_row, value_row = (dim + _front(dtype) for dim in (shape.key_dim, shape.value_dim))
            keys = pages(shape.heads, key_row)
            values = keys[..., :value_row] if shape.values_in_keys else pages(shape.heads, value_row)
            self.layers.append(LayerCache(keys, values))

    def reach(self, block: int) -> None:
        """A block, and all before it, may now be written."""
        self._reached = max(self._reached, block + 1)
        if self._reached > self._found:
            self._find(self._reached + self._stride)

    def find_ahead(self) -> bool:
        """Find memory for some more blocks; gives whether that would help once more."""
        wanted = min(self._reached + self._reserve, len(self._blocks))
        if self._found < wanted:
            self._find(self._found + self._stride)
        return self._found < wanted

    def _find(self, end: int) -> None:
        self._blocks[self._found : end].zero_()
        self._found = min(end, len(self._blocks))


def _untouched(size: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written; in huge pages, which cost far fewer faults and misses."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
