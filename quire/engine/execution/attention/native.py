"""Attention by the compiled kernels, which read pages in place, also of sequences of different lengths."""

from __future__ import annotations

import torch
from typing_extensions import override

from quire.engine.execution.attention.backend import AttentionBackend, PreparedAttention
from quire.engine.execution.attention.chunked import ChunkMemory, chunk_sizes, within_chunks
from quire.engine.execution.attention.cross_attention import native_cross_attention
from quire.engine.execution.attention.paged import (
    DecodeTokens,
    GroupAttention,
    PagedAttention,
    QueryAttention,
    SequentialRanges,
    VarlenSpans,
)
from quire.engine.execution.attention.reference import sequential_ranges
from quire.engine.execution.attention.selected import places_of_spans, selected_counts
from quire.engine.execution.cache import KVCache
from quire.engine.execution.inputs import NativeMetadata, StepInputs
from quire.engine.execution.request_table import RequestTable
from quire.kernels import native
from quire.kernels.paged_attention import supports_pages, supports_varlen
from quire.kernels.selected_attention import TokenPlaces


class NativeAttention(AttentionBackend):
    """Attention over the pages of `cache`, which the kernels support; see `supports_cache`."""

    def __init__(self, cache: KVCache, table: RequestTable, dtype: torch.dtype, max_static_tokens: int) -> None:
        """Make the backend.

        Args:
            cache: the pages.
            table: the sequences in the batch.
            dtype: dtype of queries, keys and values.
            max_static_tokens: tokens of a step whose inputs are at fixed addresses, at most.
        """
        self._cache = cache
        self._table = table
        self._varlen = all(supports_varlen(layer.keys, layer.values, dtype) for layer in cache.layers.values())
        self._chunks = chunk_sizes(cache.layout, table.block_size)
        blocks = table.blocks.shape[2]
        self._memory = [
            None
            if size is None
            else tuple(ChunkMemory(max_static_tokens, min(size // table.block_size, blocks)) for _ in ("all", "logits"))
            for size in self._chunks
        ]
        self._selected = selected_counts(cache.layout)

    @override
    def prepare(self, inputs: StepInputs) -> PreparedAttention:
        self._cache.ensure_mapped(inputs.last_block)
        indices = inputs.model.logits_indices
        groups = [self._group(inputs, index) for index in range(len(inputs.groups))]
        attend = PagedAttention(self._cache.layers, groups, indices)
        cross = None if inputs.cross is None else native_cross_attention(self._cache.layers, inputs.cross)
        static = inputs.static and inputs.visible is None and (indices is None or self._varlen)
        static = static and (indices is None or not any(self._selected))
        return PreparedAttention(attend, static, cross)

    @override
    def prepare_following(self, inputs: StepInputs, steps: int) -> bool:
        if any(size is not None for size in self._chunks):  # the tables of chunks are made for each step
            return False
        table = self._table
        for span in inputs.spans:
            written = slice(span.length // table.block_size, (span.length + steps - 1) // table.block_size + 1)
            self._cache.ensure_mapped(int(table.blocks[:, span.row, written].max()))
        return True

    def _group(self, inputs: StepInputs, index: int) -> GroupAttention:
        """Return the attention of a group of layers."""
        metadata = inputs.groups[index].attention
        assert isinstance(metadata, NativeMetadata), "the inputs were built for another backend"
        all_rows: QueryAttention
        if inputs.model.logits_indices is None:
            all_rows = DecodeTokens(metadata.spans.block_tables, metadata.spans.seq_lens)
        elif self._varlen:
            all_rows = VarlenSpans(metadata.spans, None if inputs.visible is None else inputs.visible.bounds)
        else:
            all_rows = sequential_ranges(inputs, self._table, index, group_lengths=False)
        if inputs.visible is not None and inputs.visible.precedes_windows:
            return GroupAttention(inputs.groups[index].slots, all_rows)
        logits_rows: QueryAttention = DecodeTokens(metadata.logits.block_tables, metadata.logits.seq_lens)
        size, block_size = self._chunks[index], self._table.block_size
        if size is not None:
            all_rows, logits_rows = (within_chunks(attend, size, block_size) for attend in (all_rows, logits_rows))
        memory = self._memory[index]
        if memory is not None and inputs.static and not isinstance(all_rows, SequentialRanges):
            all_rows, logits_rows = (
                each.keep(attend) for each, attend in zip(memory, (all_rows, logits_rows), strict=True)
            )
        return GroupAttention(inputs.groups[index].slots, all_rows, logits_rows, self._places(inputs, index))

    def _places(self, inputs: StepInputs, index: int) -> TokenPlaces | None:
        """Return the places of tokens that attend to selected ones.

        Steps that may be replayed select in each context: in other steps it may be longer.
        """
        top_k, metadata = self._selected[index], inputs.groups[index].attention
        if top_k is None:
            return None
        assert isinstance(metadata, NativeMetadata)
        spans = metadata.spans
        if inputs.model.logits_indices is None:
            return TokenPlaces(spans.block_tables, spans.seq_lens)
        singles, count, *tokens = spans.counts.tolist()
        counts = [*[1] * singles, *tokens[singles:count]]
        return places_of_spans(spans.block_tables, spans.seq_lens.tolist(), counts, top_k)


def supports_cache(cache: KVCache, dtype: torch.dtype) -> bool:
    """Whether the kernels read the pages of `cache` with queries of a dtype."""
    return dtype in native.DTYPES and all(supports_pages(layer.keys, layer.values) for layer in cache.layers.values())
