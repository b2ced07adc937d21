"""Attention that gathers each sequence's pages into one tensor; it runs on every device that torch runs on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from quire.engine.execution.attention.backend import PreparedAttention
from quire.engine.execution.attention.paged import DecodeTokens, PagedAttend, PrefillSpan, SequentialRanges
from quire.engine.execution.cache import KVCache
from quire.engine.execution.inputs import Span, StepInputs
from quire.engine.execution.table import RequestTable


class ReferenceAttention:
    """Attention over the pages of `cache`."""

    def __init__(self, cache: KVCache, table: RequestTable) -> None:
        self._cache = cache
        self._table = table

    def prepare(self, inputs: StepInputs) -> PreparedAttention:
        """See `AttentionBackend`."""
        self._cache.ensure_mapped(inputs.last_block)
        all_rows = sequential_ranges(inputs.spans, self._table, group_lengths=True)
        attend = PagedAttend(self._cache.layers, inputs.slots, all_rows, inputs.model.logits_indices)
        return PreparedAttention(attend, static=False)


def sequential_ranges(spans: Sequence[Span], table: RequestTable, *, group_lengths: bool) -> SequentialRanges:
    """Single tokens in groups, longer spans one by one.

    `group_lengths`: single tokens attend together only with others of similar length. All of a group pay for its
    longest sequence where pages are gathered, and so at most twice their own length.
    """

    def group(span: Span) -> int:
        return _num_blocks(span, table).bit_length() if group_lengths else 0

    single = [span for span in spans if span.count == 1]
    groups = [list(members) for _, members in groupby(single, group)]
    ranges = [(members[0].offset, members[0].offset + len(members), _decode(members, table)) for members in groups]
    prefills = [(s.offset, s.offset + s.count, _prefill(s, table)) for s in spans if s.count > 1]
    return SequentialRanges([*ranges, *prefills])


def _decode(spans: Sequence[Span], table: RequestTable) -> DecodeTokens:
    rows = [span.row for span in spans]
    width = max(_num_blocks(span, table) for span in spans)
    return DecodeTokens(torch.from_numpy(table.blocks[rows, :width]), torch.tensor([span.length for span in spans]))


def _prefill(span: Span, table: RequestTable) -> PrefillSpan:
    return PrefillSpan(torch.from_numpy(table.blocks[span.row, : _num_blocks(span, table)]), span.length)


def _num_blocks(span: Span, table: RequestTable) -> int:
    return -(-span.length // table.block_size)
