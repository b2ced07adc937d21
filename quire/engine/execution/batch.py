"""StepInputs: a plan as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.engine.execution.table import RequestTable
from quire.engine.scheduling.plan import Work
from quire.kernels import native


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
        single: where each token is a single one that samples, what attention reads of it.
    """

    spans: Sequence[Span]
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    single: Single | None = None


@dataclass(frozen=True, slots=True)
class Single:
    """Of a step of single tokens, whose inputs all lie where those of any other such step of as many do.

    Attributes:
        tables: (tokens, blocks of a context) int32 block tables, of which a row holds as many as its sequence has.
        lengths: (tokens,) int64 positions, the token's own included.
        last_block: the last of the blocks that are written to.
    """

    tables: Tensor
    lengths: Tensor
    last_block: int


class Layout:
    """Lays out steps' work as flat arrays."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        rows = len(table.lengths)
        self._arrays = [torch.zeros(rows, dtype=torch.int64) for _ in range(4)]  # tokens, positions, slots, lengths
        self._arrays.append(torch.zeros(table.blocks.shape, dtype=torch.int32))
        self._addresses = [array.data_ptr() for array in self._arrays]
        self._known, self._blocks = table.tokens.ctypes.data, table.blocks.ctypes.data
        self._parts: dict[int, list[Tensor]] = {}  # of the arrays, by how many tokens they are for

    def inputs(self, work: Sequence[Work]) -> StepInputs:
        """Of one step."""
        spans = _spans(work, self._table)
        if native.instructions() is not None and all(span.count == 1 and span.samples for span in spans):
            return self._single(spans)
        rows = np.repeat([span.row for span in spans], [span.count for span in spans])
        positions = np.concatenate([np.arange(span.start, span.length) for span in spans])
        block, offset = np.divmod(positions, self._table.block_size)
        slots = self._table.blocks[rows, block].astype(np.int64) * self._table.block_size + offset
        return StepInputs(
            spans,
            torch.from_numpy(self._table.tokens[rows, positions].astype(np.int64)),
            torch.from_numpy(positions),
            torch.from_numpy(slots),
        )

    def _single(self, spans: Sequence[Span]) -> StepInputs:
        """In one native call: caches are cold behind each step's weights, so that every line of Python takes long."""
        table, count = self._table, len(spans)
        last_block = native.kernels.lay_out(
            [span.row for span in spans], [span.start for span in spans], self._known, table.tokens.shape[1],
            self._blocks, table.blocks.shape[1], table.block_size, *self._addresses,
        )  # fmt: skip
        if count not in self._parts:
            self._parts[count] = [array[:count] for array in self._arrays]
        tokens, positions, slots, lengths, tables = self._parts[count]
        return StepInputs(spans, tokens, positions, slots, Single(tables, lengths, last_block))


def _spans(work: Sequence[Work], table: RequestTable) -> list[Span]:
    ordered = sorted(work, key=lambda item: (item.count > 1, item.start)) if len(work) > 1 else work
    spans, offset = [], 0
    for item in ordered:
        spans.append(Span(table.row_of(item.request_id), offset, item.start, item.count, item.samples, item.draft))
        offset += item.count
    return spans
