"""Attention by Triton kernels: generated tokens in one call, the spans of prompts in another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.execution.attention.backend import AttentionBackend, PreparedAttention
from quire.engine.execution.attention.chunked import chunk_sizes, last_chunks
from quire.engine.execution.attention.cross_attention import PagedCrossAttention
from quire.engine.execution.attention.paged import GroupAttention, PagedAttention, QueryAttention
from quire.engine.execution.attention.selected import places_on_device, selected_counts, tokens_of_spans
from quire.engine.execution.cache import KVCache
from quire.engine.execution.cache_layout import LayerCache
from quire.engine.execution.inputs import CrossAttentionInputs, DeviceMetadata, StepInputs
from quire.kernels.paged_attention import AttentionParams, attend_singles, attend_spans


@dataclass(frozen=True, slots=True)
class SingleQueries(QueryAttention):
    """Queries that attend as single tokens, each a row of `tables` (tokens, blocks) int32 and `lengths` (tokens,)."""

    tables: Tensor
    lengths: Tensor
    max_len: int

    @override
    def __call__(self, q: Tensor, cache: LayerCache, params: AttentionParams) -> Tensor:
        return attend_singles(q, cache.keys, cache.values, self.tables, self.lengths, self.max_len, params)


@dataclass(frozen=True, slots=True)
class StepQueries(QueryAttention):
    """All queries of a step. `visible`: see `VisibleRanges.bounds`."""

    metadata: DeviceMetadata
    visible: Tensor | None = None

    @override
    def __call__(self, q: Tensor, cache: LayerCache, params: AttentionParams) -> Tensor:
        singles, spans = self.metadata.singles, self.metadata.spans
        count, out = len(singles.seq_lens), []
        if count or not len(spans.seq_lens):
            generated = SingleQueries(singles.block_tables, singles.seq_lens, self.metadata.max_seq_len)
            out.append(generated(q[:count], cache, params))
        if len(spans.seq_lens):
            visible = None if self.visible is None or params.is_causal else self.visible[count:]
            starts, tables, lengths = self.metadata.query_starts, spans.block_tables, spans.seq_lens
            out.append(attend_spans(q[count:], cache.keys, cache.values, tables, lengths, starts, params, visible))
        return out[0] if len(out) == 1 else torch.cat(out)


@dataclass(frozen=True, slots=True)
class ChunkedSingles(QueryAttention):
    """Queries that attend as single tokens within chunks of `size` positions."""

    singles: SingleQueries
    size: int
    block_size: int

    @override
    def __call__(self, q: Tensor, cache: LayerCache, params: AttentionParams) -> Tensor:
        # Here, as a graph computes it from the tables of each replay.
        tables, lengths = last_chunks(self.singles.tables, self.singles.lengths, self.size, self.block_size)
        return SingleQueries(tables, lengths, min(self.singles.max_len, self.size))(q, cache, params)


@dataclass(frozen=True, slots=True)
class ChunkedQueries(QueryAttention):
    """All queries of a step, within chunks.

    Attributes:
        metadata: the queries.
        singles: those of one token, of which there are `count`.
        bounds: (tokens of spans, 2) int32, for each the first position of its chunk and the one behind its own.
    """

    metadata: DeviceMetadata
    singles: ChunkedSingles
    count: int
    bounds: Tensor

    @classmethod
    def of(cls, metadata: DeviceMetadata, tokens: int, size: int, block_size: int) -> ChunkedQueries:
        """Return those of a step of so many tokens."""
        singles, count = metadata.singles, len(metadata.singles.seq_lens)
        single = SingleQueries(singles.block_tables, singles.seq_lens, metadata.max_seq_len)
        if len(metadata.spans.seq_lens):
            _, seen = tokens_of_spans(metadata, tokens - count)
        else:
            seen = metadata.query_starts.new_empty(0)
        bounds = torch.stack(((seen - 1) // size * size, seen), 1).int()
        return cls(metadata, ChunkedSingles(single, size, block_size), count, bounds)

    @override
    def __call__(self, q: Tensor, cache: LayerCache, params: AttentionParams) -> Tensor:
        spans, count, out = self.metadata.spans, self.count, []
        if count or not len(spans.seq_lens):
            out.append(self.singles(q[:count], cache, params))
        if len(spans.seq_lens):
            # A window of the own position alone, and the rest of the chunk beside it.
            nearest, starts = replace(params, window=1), self.metadata.query_starts
            tables, lengths = spans.block_tables, spans.seq_lens
            out.append(attend_spans(q[count:], cache.keys, cache.values, tables, lengths, starts, nearest, self.bounds))
        return out[0] if len(out) == 1 else torch.cat(out)


class TritonAttention(AttentionBackend):
    """Attention over the pages of `cache`."""

    def __init__(self, cache: KVCache, block_size: int) -> None:
        self._layers = cache.layers
        self._block_size = block_size
        self._chunks = chunk_sizes(cache.layout, block_size)
        self._selected = selected_counts(cache.layout)

    @override
    def prepare(self, inputs: StepInputs) -> PreparedAttention:
        groups, visible = list[GroupAttention](), inputs.visible
        bounds = None if visible is None else visible.bounds
        for group, top_k, size in zip(inputs.groups, self._selected, self._chunks, strict=True):
            metadata = group.attention
            assert isinstance(metadata, DeviceMetadata), "the inputs were built for another backend"
            rows = SingleQueries(metadata.logits.block_tables, metadata.logits.seq_lens, metadata.max_seq_len)
            if size is not None:
                queries = ChunkedQueries.of(metadata, inputs.num_tokens, size, self._block_size)
                chunked = ChunkedSingles(rows, size, self._block_size)
                groups.append(GroupAttention(group.slots, queries, chunked))
                continue
            logits_rows = None if visible is not None and visible.precedes_windows else rows
            places = None if top_k is None else places_on_device(metadata, inputs.num_tokens, top_k)
            groups.append(GroupAttention(group.slots, StepQueries(metadata, bounds), logits_rows, places))
        attend = PagedAttention(self._layers, groups, inputs.model.logits_indices)
        cross = None if inputs.cross is None else _cross(self._layers, inputs.cross)
        return PreparedAttention(attend, inputs.static, cross)


def _cross(layers: Mapping[int, LayerCache], inputs: CrossAttentionInputs) -> PagedCrossAttention:
    """Cross-attention, in which all tokens attend as single ones: the positions of an item have no order."""
    most = inputs.tables.shape[1] * layers[0].keys.shape[2]
    return PagedCrossAttention(
        layers,
        SingleQueries(inputs.tables, inputs.lengths, most),
        SingleQueries(inputs.logits_tables, inputs.logits_lengths, most),
    )
