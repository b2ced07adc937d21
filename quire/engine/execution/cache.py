"""The KV tensors of all layers, and how many blocks of them fit into memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.config.options import EngineOptions
from quire.engine.execution.memory import free_memory
from quire.engine.models.decoder import CacheShape


class OutOfCacheMemory(Exception):
    """The KV cache that memory allows is too small for what it has to hold."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Pages of one layer, each (heads, blocks, block_size, dim). `values` may be a view of `keys`."""

    keys: Tensor
    values: Tensor


def block_bytes(shapes: Sequence[CacheShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return sum(shape.numbers for shape in shapes) * block_size * dtype.itemsize


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


def allocate_caches(
    shapes: Sequence[CacheShape], num_blocks: int, block_size: int, dtype: torch.dtype
) -> list[LayerCache]:
    """Empty pages for every layer. The system backs them with memory as they are first written."""
    return [_allocate(shape, num_blocks, block_size, dtype) for shape in shapes]


def _allocate(shape: CacheShape, num_blocks: int, block_size: int, dtype: torch.dtype) -> LayerCache:
    keys = _zeros((shape.heads, num_blocks, block_size, shape.key_dim), dtype)
    if shape.values_in_keys:
        return LayerCache(keys, keys[..., : shape.value_dim])
    return LayerCache(keys, _zeros((shape.heads, num_blocks, block_size, shape.value_dim), dtype))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written: numpy gets them from calloc, torch.zeros writes them."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
