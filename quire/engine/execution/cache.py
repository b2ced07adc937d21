"""KV caches: the pages of all layers, and how many blocks of them fit into memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from quire.config.options import EngineOptions
from quire.engine.models.networks.decoder import CacheShape
from quire.kernels.int8_pages import SCALE

_PREFAULT_BYTES = 8 << 20  # at a time


class OutOfCacheMemory(Exception):
    """The KV cache that fits into memory is too small for one request."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Pages of one layer, each (heads, blocks, block_size, dim), not contiguous. `values` may be a view of `keys`.

    In int8 pages a scale precedes each row of elements. Between rows there may be unused bytes, which align them.

    Attributes:
        shape: elements that the layer caches of a token.
    """

    keys: Tensor
    values: Tensor
    shape: CacheShape


class KVCache(Protocol):
    """The pages of all layers.

    Attributes:
        layers: the pages of each layer.
    """

    layers: Sequence[LayerCache]

    def ensure_mapped(self, block: int) -> None:
        """Back a block, and all before it, with memory; called before a step writes to it."""

    def prefault(self) -> bool:
        """Back some more blocks with memory ahead of time; returns whether there are more. Called while idle."""


def block_bytes(shapes: Sequence[CacheShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return _elements_per_token(shapes, dtype) * block_size * dtype.itemsize


def _elements_per_token(shapes: Sequence[CacheShape], dtype: torch.dtype) -> int:
    """Elements of a token over all layers, including the bytes of int8 scales and those that align rows."""
    return sum(_row(shape, dim, dtype)[0] * shape.heads for shape in shapes for dim in _dims(shape))


def _dims(shape: CacheShape) -> tuple[int, ...]:
    """Elements of each of a head's rows."""
    return (shape.key_elements,) if shape.values_in_keys else (shape.key_elements, shape.value_elements)


def _row(shape: CacheShape, dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Elements that a row of `dim` elements takes in pages, and how many of them are unused in front of it."""
    alignment, scale = shape.row_alignment, scale_bytes(dtype)
    header, elements = (-(-nbytes // alignment) * alignment for nbytes in (scale, dim * dtype.itemsize))
    return (header + elements) // dtype.itemsize, header - scale


def scale_bytes(dtype: torch.dtype) -> int:
    """Bytes of the scale that precedes each row of a page."""
    return SCALE if dtype is torch.int8 else 0


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


def count_blocks(options: EngineOptions, bytes_per_block: int, context_len: int, available: CacheMemory | None) -> int:
    """Number of blocks to allocate: as configured, or as much as memory and the largest possible need allow.

    `available`: the memory that the KV cache may take; None: as --kv-cache-memory-bytes says.

    Raises:
        OutOfCacheMemory: not even one block fits.
    """
    if available is None:
        memory, advice = int(options.kv_cache_memory_bytes or 0), "raise --kv-cache-memory-bytes"
    else:
        max_needed = options.max_num_seqs * -(-context_len // options.block_size)
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
    """Pages of all layers in one allocation of a device's memory, zero at first.

    Those of a layer are adjacent, and in them all heads of a block.

    Attributes:
        layers: the pages of each layer.
    """

    def __init__(
        self,
        shapes: Sequence[CacheShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the memory.

        Raises:
            OutOfCacheMemory: the device has not enough.
        """
        elements = _elements_per_token(shapes, dtype) * block_size * num_blocks
        try:
            memory = torch.zeros(elements, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise OutOfCacheMemory(
                f"the {elements * dtype.itemsize} bytes of the KV cache cannot be allocated: "
                "lower --kv-cache-memory-bytes or --gpu-memory-utilization"
            ) from error
        offset = 0

        def pages(heads: int, dim: int) -> Tensor:
            nonlocal offset
            view = memory[offset : offset + num_blocks * heads * block_size * dim]
            offset += len(view)
            return view.view(num_blocks, heads, block_size, dim).transpose(0, 1)

        self.layers = [_layer_cache(shape, dtype, pages) for shape in shapes]

    @override
    def ensure_mapped(self, block: int) -> None:
        pass  # all memory is mapped when it is allocated

    @override
    def prefault(self) -> bool:
        return False


def _layer_cache(shape: CacheShape, dtype: torch.dtype, pages: Callable[[int, int], Tensor]) -> LayerCache:
    """The pages of a layer; `pages` allocates those of some heads and elements."""

    def rows(dim: int) -> Tensor:
        taken, unused = _row(shape, dim, dtype)
        return pages(shape.heads, taken)[..., unused : unused + scale_bytes(dtype) + dim]

    keys = rows(shape.key_elements)
    value_row = scale_bytes(dtype) + shape.value_elements
    values = keys[..., :value_row] if shape.values_in_keys else rows(shape.value_elements)
    return LayerCache(keys, values, shape)


class HostKVCache(KVCache):
    """Pages of all layers in one allocation of host memory, zero at first.

    All layers of a block are adjacent, head by head, so that few pages of memory are touched for a block. The system
    maps memory when it is first written, which takes seconds per GB on a virtual machine. So it is written ahead of
    its use: some blocks at a time, by all threads, and more of them while the engine is idle.

    Attributes:
        layers: the pages of each layer.
    """

    def __init__(
        self, shapes: Sequence[CacheShape], num_blocks: int, block_size: int, dtype: torch.dtype, prefault: int = 0
    ) -> None:
        """`prefault`: bytes to keep mapped ahead of the blocks in use, while idle."""
        per_block = _elements_per_token(shapes, dtype) * block_size
        self._blocks = _lazy_zeros(num_blocks * per_block * dtype.itemsize, dtype).view(num_blocks, per_block)
        self._stride = max(1, _PREFAULT_BYTES // (per_block * dtype.itemsize))
        self._ahead = prefault // (per_block * dtype.itemsize)
        self._used = self._mapped = 0  # blocks that were written to, and that are mapped; both count from the first
        offset = 0

        def pages(heads: int, dim: int) -> Tensor:
            nonlocal offset
            size, strides = (heads, num_blocks, block_size, dim), (block_size * dim, per_block, dim, 1)
            view = self._blocks.as_strided(size, strides, offset)
            offset += heads * block_size * dim
            return view

        self.layers = [_layer_cache(shape, dtype, pages) for shape in shapes]

    @override
    def ensure_mapped(self, block: int) -> None:
        self._used = max(self._used, block + 1)
        if self._used > self._mapped:
            self._map(self._used + self._stride)

    @override
    def prefault(self) -> bool:
        wanted = min(self._used + self._ahead, len(self._blocks))
        if self._mapped < wanted:
            self._map(self._mapped + self._stride)
        return self._mapped < wanted

    def _map(self, end: int) -> None:
        self._blocks[self._mapped : end].zero_()
        self._mapped = min(end, len(self._blocks))


def _lazy_zeros(size: int, dtype: torch.dtype) -> Tensor:
    """Zeros whose memory is not resident until it is written; in huge pages, for fewer page faults and TLB misses."""
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise OutOfCacheMemory(
            f"the {size} bytes of the KV cache cannot be allocated: lower --kv-cache-memory-bytes"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
