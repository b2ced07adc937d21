"""StepInputs: a plan as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from quire.engine.execution.table import RequestTable
from quire.engine.models.layers.replays import MOST_TOKENS
from quire.engine.scheduling.plan import Work
from quire.kernels import native
from quire.kernels.paged_attention import AttentionMetadata

_MOST_PARTS = 256  # sizes of steps whose views of the arrays are kept


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence in the batch.

    Attributes:
        row: in the request table.
        offset: of the first token among the batch's.
        start: position of the first token in its sequence.
        count: tokens.
        samples: the sequence gets its next token from the last one.
        draft: the last tokens, if they are guesses; the one before them and each right one give a token.
    """

    row: int
    offset: int
    start: int
    count: int
    samples: bool
    draft: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Positions of the sequence that are computed after the step."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model reads.

    Attributes:
        spans: single tokens first, in order of their block tables' lengths, then longer spans.
        tokens: (tokens,) int64 ids, as are positions and slots = block * block_size + offset in it.
        last_block: the last of the blocks that are written to.
        tables: what the compiled attention reads; none where they are missing.
    """

    spans: Sequence[Span]
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    last_block: int
    tables: StepTables | None = None

    @property
    def single(self) -> bool:
        """Whether each token is a sequence's only one, and gives another."""
        return all(span.count == 1 and span.samples for span in self.spans)


@dataclass(frozen=True, slots=True)
class StepTables:
    """Of a step's spans, and of those last tokens that give another, if not all of the step's do.

    Attributes:
        stay: whether these and the step's other inputs lie where those of other such steps do.
        end_rows: (ends,) int64 rows of the batch.
        ends: they attend as single tokens.
    """

    stay: bool
    spans: AttentionMetadata
    end_rows: Tensor
    ends: AttentionMetadata


class Layout:
    """Lays out steps' work as flat arrays."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._kept = _Arrays(table, MOST_TOKENS)

    def inputs(self, work: Sequence[Work]) -> StepInputs:
        """Of one step."""
        spans = _spans(work, self._table)
        if native.instructions() is not None:
            return self._laid_out(spans)
        rows = np.repeat([span.row for span in spans], [span.count for span in spans])
        positions = np.concatenate([np.arange(span.start, span.length) for span in spans])
        block, offset = np.divmod(positions, self._table.block_size)
        blocks = self._table.blocks[rows, block].astype(np.int64)
        return StepInputs(
            spans,
            torch.from_numpy(self._table.tokens[rows, positions].astype(np.int64)),
            torch.from_numpy(positions),
            torch.from_numpy(blocks * self._table.block_size + offset),
            int(blocks.max()),
        )

    def _laid_out(self, spans: list[Span]) -> StepInputs:
        """In one native call: caches are cold behind each step's weights, so that every line of Python takes long."""
        table, counts = self._table, [span.count for span in spans]
        count = sum(counts)
        stay = count <= MOST_TOKENS
        arrays = self._kept if stay else _Arrays(table, count)
        ends = [i for i, span in enumerate(spans) if span.samples and not span.draft]
        if len(ends) == count:
            ends = []
        last_block = native.kernels.build_inputs(
            arrays.kernel_arrays, [span.row for span in spans], [span.start for span in spans], counts, ends
        )
        tokens, positions, slots, tables = arrays.parts(count, len(spans), len(ends), stay=stay)
        return StepInputs(spans, tokens, positions, slots, last_block, tables)


class _Arrays:
    """Where steps of up to so many tokens are laid out."""

    def __init__(self, table: RequestTable, most_tokens: int) -> None:
        self._table = table
        self._tokens = [torch.empty(most_tokens, dtype=torch.int64) for _ in range(3)]  # and positions, slots
        self._spans, self._ends = _span_tables(table), _span_tables(table)
        self._end_rows = torch.empty(len(table.lengths), dtype=torch.int64)
        self._parts: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor, StepTables]] = {}

    @cached_property
    def kernel_arrays(self) -> object:
        """What the native `build_inputs` fills."""
        table, spans, ends = self._table, self._spans, self._ends
        tokens, positions, slots = self._tokens
        arrays: object = native.kernels.input_arrays(
            known_tokens=torch.from_numpy(table.tokens),
            known_blocks=torch.from_numpy(table.blocks),
            block_size=table.block_size,
            tokens=tokens,
            positions=positions,
            slots=slots,
            seq_lens=spans.seq_lens,
            span_counts=spans.counts,
            block_tables=spans.block_tables,
            end_rows=self._end_rows,
            end_seq_lens=ends.seq_lens,
            end_block_tables=ends.block_tables,
        )
        return arrays

    def parts(self, tokens: int, spans: int, ends: int, *, stay: bool) -> tuple[Tensor, Tensor, Tensor, StepTables]:
        """What a step of that size uses of them: tokens, positions, slots, tables."""
        found = self._parts.get((tokens, spans, ends))
        if found is None:
            if len(self._parts) == _MOST_PARTS:
                self._parts.clear()
            ids, positions, slots = (array[:tokens] for array in self._tokens)
            tables = StepTables(stay, _first(self._spans, spans), self._end_rows[:ends], _first(self._ends, ends))
            found = self._parts[tokens, spans, ends] = (ids, positions, slots, tables)
        return found


def _span_tables(table: RequestTable) -> AttentionMetadata:
    rows = len(table.lengths)
    tables = torch.zeros(table.blocks.shape, dtype=torch.int32)
    return AttentionMetadata(tables, torch.zeros(rows, dtype=torch.int64), torch.zeros(1 + rows, dtype=torch.int64))


def _first(tables: AttentionMetadata, count: int) -> AttentionMetadata:
    return AttentionMetadata(tables.block_tables[:count], tables.seq_lens[:count], tables.counts)


def _spans(work: Sequence[Work], table: RequestTable) -> list[Span]:
    ordered = sorted(work, key=lambda item: (item.count > 1, item.start)) if len(work) > 1 else work
    spans, offset = [], 0
    for item in ordered:
        spans.append(Span(table.row_of(item.request_id), offset, item.start, item.count, item.samples, item.draft))
        offset += item.count
    return spans
