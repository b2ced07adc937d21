"""Attention that gathers each sequence's pages into one tensor; it runs on every device that torch runs on."""

from __future__ import annotations

import itertools

import torch
from typing_extensions import override

from quire.engine.execution.attention.backend import AttentionBackend, PreparedAttention
from quire.engine.execution.attention.chunked import chunk_sizes, within_chunks
from quire.engine.execution.attention.cross_attention import reference_cross_attention
from quire.engine.execution.attention.paged import (
    DecodeTokens,
    GroupAttention,
    PagedAttention,
    PrefillSpan,
    QueryAttention,
    SequentialRanges,
)
from quire.engine.execution.attention.selected import places_of_spans, selected_counts
from quire.engine.execution.cache import KVCache
from quire.engine.execution.inputs import Span, StepInputs
from quire.engine.execution.request_table import RequestTable
from quire.kernels.selected_attention import TokenPlaces


class ReferenceAttention(AttentionBackend):
    """Attention over the pages of `cache`."""

    def __init__(self, cache: KVCache, table: RequestTable) -> None:
        self._cache = cache
        self._table = table
        self._chunks = chunk_sizes(cache.layout, table.block_size)
        self._selected = selected_counts(cache.layout)

    @override
    def prepare(self, inputs: StepInputs) -> PreparedAttention:
        self._cache.ensure_mapped(inputs.last_block)
        groups = []
        for index, (group, size) in enumerate(zip(inputs.groups, self._chunks, strict=True)):
            attention: QueryAttention = sequential_ranges(inputs, self._table, index, group_lengths=True)
            if size is not None:
                attention = within_chunks(attention, size, self._table.block_size)
            groups.append(GroupAttention(group.slots, attention, places=self._places(inputs, index)))
        attend = PagedAttention(self._cache.layers, groups, inputs.model.logits_indices)
        spans, table = inputs.spans, self._table
        cross = reference_cross_attention(self._cache.layers, spans, table) if table.cross_blocks.size else None
        return PreparedAttention(attend, static=False, cross=cross)

    def _places(self, inputs: StepInputs, index: int) -> TokenPlaces | None:
        """Return the places of tokens that attend to selected ones."""
        top_k, spans = self._selected[index], inputs.spans
        if top_k is None:
            return None
        tables = torch.from_numpy(self._table.blocks[index][[span.row for span in spans]])
        return places_of_spans(tables, [span.length for span in spans], [span.count for span in spans], top_k)


def sequential_ranges(inputs: StepInputs, table: RequestTable, group: int, *, group_lengths: bool) -> SequentialRanges:
    """Return the attention of a step: generated tokens together, spans of prompts one by one; see `Span.generated`.

    Args:
        inputs: those of the step.
        table: the sequences in the batch.
        group: index of the group of layers, whose block tables are read.
        group_lengths: generated tokens attend together only with others of similar length. All of these pay for the
            longest sequence where pages are gathered, and so at most twice their own length.
    """

    def blocks(length: int) -> int:
        return -(-length // table.block_size)

    spans, visible = inputs.spans, inputs.visible
    queries = [(span.row, length) for span in spans if span.generated for length in _lengths(span)]
    ranges: list[tuple[int, int, QueryAttention]] = []
    offset = 0
    for _, together in itertools.groupby(queries, lambda query: blocks(query[1]).bit_length() if group_lengths else 0):
        rows, lengths = zip(*together, strict=True)
        tables = torch.from_numpy(table.blocks[group][list(rows), : blocks(max(lengths))])
        ranges.append((offset, offset + len(rows), DecodeTokens(tables, torch.tensor(lengths))))
        offset += len(rows)
    for span in itertools.dropwhile(lambda span: span.generated, spans):
        block_table = torch.from_numpy(table.blocks[group, span.row, : blocks(span.length)])
        begin, end = span.offset, span.offset + span.count
        bounds = None if visible is None else visible.bounds[begin:end]
        ranges.append((begin, end, PrefillSpan(block_table, span.length, bounds)))
    return SequentialRanges(ranges)


def _lengths(span: Span) -> range:
    """Positions that each token of a span attends to, its own included."""
    return range(span.start + 1, span.length + 1)
