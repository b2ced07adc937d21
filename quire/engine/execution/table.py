"""RequestTable: one fixed row for each sequence in the batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.engine.scheduling.plan import Admission, StepPlan
from quire.engine.wire.protocol import SamplingParams


@dataclass(slots=True)
class Row:
    """What the runner knows of a sequence besides the table's arrays."""

    request_id: str
    params: SamplingParams
    prompt_len: int
    prompt_logprobs: int | None


class RequestTable:
    """Tokens and block tables by row.

    Attributes:
        tokens: (rows, context_len) int32; lengths: (rows,) how many are known.
        blocks: (rows, blocks of a context) int32; num_blocks: (rows,) how many are held.
    """

    def __init__(self, rows: int, context_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.tokens = np.zeros((rows, context_len), np.int32)
        self.lengths = np.zeros(rows, np.int32)
        self.blocks = np.zeros((rows, -(-context_len // block_size)), np.int32)
        self.num_blocks = np.zeros(rows, np.int32)
        self._rows: dict[int, Row] = {}
        self._index: dict[str, int] = {}
        self._free = list(range(rows - 1, -1, -1))

    def __getitem__(self, row: int) -> Row:
        return self._rows[row]

    def row_of(self, request_id: str) -> int:
        """Row of a sequence in the batch."""
        return self._index[request_id]

    def apply(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        """Bring the rows up to a plan; gives the rows that were emptied and those that were filled."""
        emptied = [self._remove(request_id) for request_id in plan.removed]
        filled = [self._add(admission) for admission in plan.admitted]
        for work in plan.work:
            if work.new_blocks:
                row = self._index[work.request_id]
                held = self.num_blocks[row]
                self.blocks[row, held : held + len(work.new_blocks)] = work.new_blocks
                self.num_blocks[row] = held + len(work.new_blocks)
            if work.draft:  # behind what is known; what is sampled then takes its place
                known = self.lengths[self._index[work.request_id]]
                self.tokens[self._index[work.request_id], known : known + len(work.draft)] = work.draft
        return emptied, filled

    def append(self, row: int, token: int) -> None:
        """Add a sampled token."""
        if self.lengths[row] < self.tokens.shape[1]:
            self.tokens[row, self.lengths[row]] = token
            self.lengths[row] += 1

    def known_tokens(self, row: int) -> NDArray[np.int32]:
        """Prompt and output so far."""
        return self.tokens[row, : self.lengths[row]]

    def check(self) -> None:
        """Assert that the books balance."""
        assert sorted(self._index.values()) == sorted(self._rows), "rows and index differ"
        assert len(self._free) + len(self._rows) == len(self.lengths), "rows got lost"

    def _add(self, admission: Admission) -> int:
        row = self._free.pop()
        self._rows[row] = Row(admission.request_id, admission.params, admission.prompt_len, admission.prompt_logprobs)
        self._index[admission.request_id] = row
        self.tokens[row, : len(admission.tokens)] = admission.tokens
        self.lengths[row] = len(admission.tokens)
        self.num_blocks[row] = 0
        return row

    def _remove(self, request_id: str) -> int:
        row = self._index.pop(request_id)
        del self._rows[row]
        self._free.append(row)
        return row
