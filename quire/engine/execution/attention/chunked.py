"""Attention within chunks: each query attends to the positions of its chunk, up to its own (Llama 4).

Chunks begin at multiples of their size, which is a multiple of a block. So the part of a sequence that is in a chunk is
a sequence of its own, whose block table begins with the chunk's first block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from quire.engine.execution.attention.paged import (
    DecodeTokens,
    PrefillSpan,
    QueryAttention,
    SequentialRanges,
    VarlenSpans,
)
from quire.engine.execution.cache_layout import CacheLayout
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.specs.cache import ChunkCache, IndexedCache
from quire.kernels.paged_attention import AttentionMetadata


def chunk_sizes(layout: CacheLayout, block_size: int) -> list[int | None]:
    """Return the size of the chunks of each group that grows; None: it has none.

    Where no group grows there is one size, as the inputs of a step have a group then, too.

    Raises:
        UnsupportedModel: a chunk would not begin with a block.
    """
    sizes = [group.kind.size if isinstance(group.kind, ChunkCache) else None for group in layout.growing]
    for size in sizes:
        if size is not None and size % block_size:
            raise UnsupportedModel(
                f"attention in chunks of {size} tokens needs a --block-size that divides {size}, not {block_size}"
            )
    return sizes or [None]


def check_for_libraries(layout: CacheLayout, backend: str) -> None:
    """Check that attention needs nothing that Quire's kernels alone compute.

    Args:
        layout: that of the cache.
        backend: value of --attention-backend.

    Raises:
        UnsupportedModel: tokens attend within chunks, of which a sequence may have several, or to selected tokens.
    """
    for group in layout.growing:
        match group.kind:
            case IndexedCache(top_k=limit):
                what = f"attention to {limit} selected tokens is not supported in longer contexts"
            case ChunkCache(size=limit):
                what = f"attention in chunks of {limit} tokens is not supported behind the first chunk"
            case _:
                continue
        raise UnsupportedModel(
            f"{what} with --attention-backend {backend}: use triton, or --max-model-len of at most {limit}"
        )


def within_chunks(attend: QueryAttention, size: int, block_size: int) -> QueryAttention:
    """Return attention of the same queries within chunks of `size` positions.

    Args:
        attend: their attention to all earlier positions.
        size: positions of a chunk.
        block_size: positions of a block.
    """
    match attend:
        case DecodeTokens(tables=tables, lengths=lengths):
            return DecodeTokens(*last_chunks(tables, lengths, size, block_size))
        case VarlenSpans(metadata=metadata):
            return VarlenSpans(_divided(metadata, size, block_size))
        case SequentialRanges(ranges=ranges):
            return SequentialRanges([part for piece in ranges for part in _parts(*piece, size, block_size)])
    raise AssertionError(f"{type(attend).__name__} is not divided into chunks")


class ChunkMemory:
    """Memory for the spans within chunks of a step, at the same addresses in all steps: so calls can be replayed."""

    def __init__(self, spans: int, blocks: int) -> None:
        """`spans`: of a step, at most; `blocks`: those of a chunk."""
        self._tables = torch.zeros(spans, blocks, dtype=torch.int32)
        self._lengths = torch.zeros(spans, dtype=torch.int64)
        self._counts = torch.zeros(2 + spans, dtype=torch.int64)

    def keep(self, attend: QueryAttention) -> QueryAttention:
        """Return the same attention, which reads this memory."""
        match attend:
            case DecodeTokens(tables=tables, lengths=lengths):
                return DecodeTokens(*self._put(tables, lengths))
            case VarlenSpans(metadata=metadata):
                counts = self._counts[: len(metadata.counts)].copy_(metadata.counts)
                return VarlenSpans(AttentionMetadata(*self._put(metadata.block_tables, metadata.seq_lens), counts))
        raise AssertionError(f"{type(attend).__name__} is not replayed")

    def _put(self, tables: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        rows = self._tables[: len(tables)]
        rows[:, : tables.shape[1]] = tables
        return rows, self._lengths[: len(lengths)].copy_(lengths)


class _Part(NamedTuple):
    """The queries of a span that are in one chunk.

    Attributes:
        block: index of the chunk's first block in the sequence.
        length: positions of the chunk, with those of the queries.
        queries: number of queries.
    """

    block: int
    length: int
    queries: int


def _split(length: int, count: int, size: int, block_size: int) -> Iterator[_Part]:
    """Divide the last `count` positions of a sequence among chunks."""
    position = length - count
    while position < length:
        chunk = position // size * size
        end = min(length, chunk + size)
        yield _Part(chunk // block_size, end - chunk, end - position)
        position = end


def last_chunks(tables: Tensor, lengths: Tensor, size: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the block tables and lengths of the last chunks of sequences; those of 0 positions keep their length."""
    starts = (lengths - 1).clamp(min=0) // size * size
    blocks = min(size // block_size, tables.shape[1])
    columns = (starts // block_size).long()[:, None] + torch.arange(blocks, device=tables.device)
    return tables.gather(1, columns.clamp(max=tables.shape[1] - 1)), lengths - starts


def _divided(metadata: AttentionMetadata, size: int, block_size: int) -> AttentionMetadata:
    """Divide spans among chunks. Single tokens, which come first, are in one chunk each."""
    singles, spans, *counts = metadata.counts.tolist()
    counts = [*[1] * singles, *counts[singles:spans]]
    parts = [
        (row, part)
        for row, (length, count) in enumerate(zip(metadata.seq_lens.tolist(), counts, strict=False))
        for part in _split(length, count, size, block_size)
    ]
    most = max((-(-part.length // block_size) for _, part in parts), default=0)
    tables = metadata.block_tables.new_zeros(len(parts), most)
    for index, (row, part) in enumerate(parts):
        blocks = metadata.block_tables[row, part.block : part.block + -(-part.length // block_size)]
        tables[index, : len(blocks)] = blocks
    lengths = torch.tensor([part.length for _, part in parts], dtype=metadata.seq_lens.dtype)
    return AttentionMetadata(
        tables, lengths, torch.tensor([singles, len(parts), *(part.queries for _, part in parts)], dtype=torch.int64)
    )


def _parts(
    begin: int, end: int, attend: QueryAttention, size: int, block_size: int
) -> Iterator[tuple[int, int, QueryAttention]]:
    """The ranges of queries, and their attention, that a range is divided into."""
    if not isinstance(attend, PrefillSpan):
        yield begin, end, within_chunks(attend, size, block_size)
        return
    assert attend.visible is None
    for part in _split(attend.length, end - begin, size, block_size):
        table = attend.table[part.block : part.block + -(-part.length // block_size)]
        yield begin, begin + part.queries, PrefillSpan(table, part.length)
        begin += part.queries
