"""Paged attention: single tokens attend together, longer spans one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from quire.engine.execution.batch import Single, Span, StepInputs
from quire.engine.execution.cache import KVCache, LayerCache
from quire.engine.execution.table import RequestTable
from quire.kernels import native
from quire.kernels.paged_attention import ScoreMath, paged_decode, paged_prefill, reads_in_place, write_pages


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


@dataclass(frozen=True, slots=True)
class _Last:
    """Some rows (ends,) of the batch, and how they attend as single tokens."""

    rows: Tensor
    group: _Group


class PagedAttention:
    """Attention over pages of `cache`, found by the block tables of `table`."""

    def __init__(self, cache: KVCache, table: RequestTable, dtype: torch.dtype) -> None:
        """`dtype`: of queries, keys and values."""
        self._cache = cache
        self._table = table
        readable = (reads_in_place(layer.keys, layer.values) for layer in cache.layers)
        self._in_place = dtype in native.CODES and all(readable)
        self._steady: dict[int, StepAttention] = {}  # by how many single tokens attend

    def plan(self, inputs: StepInputs) -> StepAttention:
        """Group the step's tokens by how they attend."""
        if self._in_place and inputs.single is not None:
            return self._decode(inputs, inputs.single)
        self._cache.reach(int(inputs.slots.max()) // self._table.block_size)
        single = [span for span in inputs.spans if span.count == 1]
        groups = [self._group(list(spans)) for _, spans in groupby(single, self._kind)]
        prefills = [self._prefill(span) for span in inputs.spans if span.count > 1]
        return StepAttention(self._cache.layers, inputs.slots, groups, prefills, last=self._last(inputs.spans))

    def _decode(self, inputs: StepInputs, single: Single) -> StepAttention:
        """All tokens attend together."""
        self._cache.reach(single.last_block)
        count = len(inputs.spans)
        if count not in self._steady:
            group = _Group(0, count, single.tables, single.lengths)
            self._steady[count] = StepAttention(self._cache.layers, inputs.slots, [group], [], stays=True)
        return self._steady[count]

    def _last(self, spans: Sequence[Span]) -> _Last | None:
        """The last tokens of spans that give some, as if they were single ones; those with a draft need more."""
        if not self._in_place:
            return None
        sampling = [span for span in spans if span.samples and not span.draft]
        rows = torch.tensor([span.offset + span.count - 1 for span in sampling], dtype=torch.int64)
        if not sampling:
            return _Last(rows, _Group(0, 0, torch.empty(0, 0, dtype=torch.int32), torch.empty(0, dtype=torch.int64)))
        return _Last(rows, self._group(sampling))

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
    """One step's attention; see `Attend`."""

    caches: Sequence[LayerCache]
    slots: Tensor
    groups: Sequence[_Group]
    prefills: Sequence[_Prefill]
    stays: bool = False
    last: _Last | None = None

    @property
    def ends(self) -> Tensor | None:
        """See `Attend`."""
        return None if self.last is None else self.last.rows

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        math: ScoreMath,
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
        ends = None
        if last and self.last is not None:
            group = self.last.group
            ends = paged_decode(q[self.last.rows], cache.keys, cache.values, group.tables, group.lengths, math)
            if cut:
                return ends
        out = [
            paged_decode(q[group.begin : group.end], cache.keys, cache.values, group.tables, group.lengths, math)
            for group in self.groups
        ]
        out += [
            paged_prefill(q[item.begin : item.end], cache.keys, cache.values, item.table, item.length, math)
            for item in self.prefills
        ]
        whole = out[0] if len(out) == 1 else torch.cat(out)
        if ends is not None and self.last is not None:
            whole[self.last.rows] = ends
        return whole
