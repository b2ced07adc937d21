"""Paged attention: single tokens attend together, longer spans one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from quire.engine.execution.batch import Span, StepInputs, StepTables
from quire.engine.execution.cache import KVCache, LayerCache
from quire.engine.execution.table import RequestTable
from quire.kernels import native
from quire.kernels.capture import RowKind, set_row_kind
from quire.kernels.paged_attention import (
    AttentionMetadata,
    AttentionParams,
    paged_decode,
    paged_prefill,
    paged_varlen,
    supports_pages,
    supports_varlen,
    write_pages,
)
from quire.kernels.take_rows import take_rows


@dataclass(frozen=True, slots=True)
class _Group:
    """Single tokens [begin, end) of the batch; `tables` (end - begin, blocks) int32, `lengths` (end - begin,)."""

    begin: int
    end: int
    tables: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Tokens [begin, end) of the batch, of one sequence with `length` positions and block table (blocks,) int32."""

    begin: int
    end: int
    table: Tensor
    length: int


class PagedAttention:
    """Attention over pages of `cache`, found by the block tables of `table`."""

    def __init__(self, cache: KVCache, table: RequestTable, dtype: torch.dtype) -> None:
        """`dtype`: of queries, keys and values."""
        self._cache = cache
        self._table = table
        readable = (supports_pages(layer.keys, layer.values) for layer in cache.layers)
        self._in_place = dtype in native.DTYPES and all(readable)
        self._supports_varlen = all(supports_varlen(layer.keys, layer.values, dtype) for layer in cache.layers)

    def plan(self, inputs: StepInputs) -> StepAttention:
        """Group the step's tokens by how they attend."""
        self._cache.reach(inputs.last_block)
        tables = inputs.tables if self._in_place else None
        if tables is not None:
            if inputs.single:
                group = _Group(0, len(inputs.spans), tables.spans.block_tables, tables.spans.seq_lens)
                return StepAttention(self._cache.layers, inputs.slots, [group], [], stays=tables.stay)
            if self._supports_varlen:
                stays = tables.stay and not any(span.draft for span in inputs.spans)
                return StepAttention(self._cache.layers, inputs.slots, [], [], tables.spans, stays, tables)
        single = [span for span in inputs.spans if span.count == 1]
        groups = [self._group(list(spans)) for _, spans in groupby(single, self._kind)]
        prefills = [self._prefill(span) for span in inputs.spans if span.count > 1]
        return StepAttention(self._cache.layers, inputs.slots, groups, prefills, last=tables)

    def _kind(self, span: Span) -> int:
        """Spans of one kind attend together. Where pages are gathered, all pay for the longest: at most twice."""
        return 0 if self._in_place else self._blocks(span).bit_length()

    def _blocks(self, span: Span) -> int:
        return -(-span.length // self._table.block_size)

    def _group(self, spans: list[Span]) -> _Group:
        rows = [span.row for span in spans]
        width = max(map(self._blocks, spans))
        tables = torch.from_numpy(self._table.blocks[rows, :width])
        begin = spans[0].offset
        return _Group(begin, begin + len(spans), tables, torch.tensor([span.length for span in spans]))

    def _prefill(self, span: Span) -> _Prefill:
        table = torch.from_numpy(self._table.blocks[span.row, : self._blocks(span)])
        return _Prefill(span.offset, span.offset + span.count, table, span.length)


@dataclass(frozen=True, slots=True)
class StepAttention:
    """One step's attention; see `Attend`. Of `spans`, or else of groups and prefills, one after the other."""

    caches: Sequence[LayerCache]
    slots: Tensor
    groups: Sequence[_Group]
    prefills: Sequence[_Prefill]
    spans: AttentionMetadata | None = None
    stays: bool = False
    last: StepTables | None = None

    @property
    def ends(self) -> Tensor | None:
        """See `Attend`."""
        return None if self.last is None else self.last.end_rows

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        math: AttentionParams,
        *,
        last: bool = False,
        cut: bool = False,
    ) -> Tensor:
        """Write the step's keys and values, then attend.

        A sequence's last token attends as a single one in the last layer, cut or not, so that its numbers do not depend
        on what other sequences want of the step.
        """
        cache = self.caches[layer]
        write_pages(cache.keys, cache.values, self.slots, k, v)
        if self.last is None or not last:
            return self._whole(q, cache, math)
        rows, tables = self.last.end_rows, self.last.ends
        if cut:
            set_row_kind(RowKind.LOGITS)
        own = take_rows(q.flatten(1), rows).unflatten(1, q.shape[1:])
        ends = paged_decode(own, cache.keys, cache.values, tables.block_tables, tables.seq_lens, math)
        if cut:
            return ends
        whole = self._whole(q, cache, math)
        whole[rows] = ends
        return whole

    def _whole(self, q: Tensor, cache: LayerCache, math: AttentionParams) -> Tensor:
        if self.spans is not None:
            return paged_varlen(q, cache.keys, cache.values, self.spans, math)
        out = [
            paged_decode(q[group.begin : group.end], cache.keys, cache.values, group.tables, group.lengths, math)
            for group in self.groups
        ]
        out += [
            paged_prefill(q[item.begin : item.end], cache.keys, cache.values, item.table, item.length, math)
            for item in self.prefills
        ]
        return out[0] if len(out) == 1 else torch.cat(out)
