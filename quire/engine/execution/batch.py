"""StepInputs: a plan as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.engine.execution.table import RequestTable
from quire.engine.scheduling.plan import Work


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
    """

    spans: Sequence[Span]
    tokens: Tensor
    positions: Tensor
    slots: Tensor


def build_inputs(work: Sequence[Work], table: RequestTable) -> StepInputs:
    """Lay out a step's work."""
    spans = _layout(work, table)
    rows = np.repeat([span.row for span in spans], [span.count for span in spans])
    positions = np.concatenate([np.arange(span.start, span.length) for span in spans])
    block, offset = np.divmod(positions, table.block_size)
    slots = table.blocks[rows, block].astype(np.int64) * table.block_size + offset
    return StepInputs(
        spans,
        torch.from_numpy(table.tokens[rows, positions].astype(np.int64)),
        torch.from_numpy(positions),
        torch.from_numpy(slots),
    )


def _layout(work: Sequence[Work], table: RequestTable) -> list[Span]:
    ordered = sorted(work, key=lambda item: (item.count > 1, item.start))
    spans, offset = [], 0
    for item in ordered:
        spans.append(Span(table.row_of(item.request_id), offset, item.start, item.count, item.samples, item.draft))
        offset += item.count
    return spans
