"""RequestTable: a fixed row for each sequence in the batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.scheduling.plan import NewSequence, PromptExtension, RotaryPositions, StepPlan


@dataclass(slots=True)
class Row:
    """The runner's state of a sequence, besides the table's arrays."""

    request_id: str
    params: SamplingParams | PoolingParams
    prompt_len: int
    prompt_logprobs: int | None


class Changes(NamedTuple):
    """Rows that were freed, rows that were then filled, and rows with extended prompts."""

    freed: list[int]
    filled: list[int]
    extended: list[int]


class RequestTable:
    """Token ids and block tables of the sequences in the batch, by row.

    Attributes:
        tokens: (rows, context_len) int32, negative where the id is unknown, see `append_unknown`; lengths: (rows,)
            tokens of each row.
        rope_offsets: (rows,) int64 to add to positions for an index into the rope tables, see `RopeTables`.
        rows_with_rope_offset: rows where it is not 0.
        prompt_positions: by row, indices into the rope tables (3, prompt) int64 of the tokens of its prompt, if it has
            pictures with positions of time, height and width. The row's offset is that of the tokens behind the prompt.
        blocks: (groups, rows, blocks of a context) int32 block tables of each group of layers. Those before a group's
            window repeat the first one in sight, so that kernels that read more than the window find numbers.
        num_blocks: (rows,) blocks of each row in every table.
        cross_blocks: (rows, blocks of an item) int32 block tables of encoded positions; cross_lengths: (rows,) int64.
        lora_ids: adapters of the rows that are computed with one, by row.
        rows_with_prompt_logprobs: rows whose prompt log-probabilities are wanted.
        rows_with_token_probs: rows that ask for probabilities after a position of their prompt.
    """

    def __init__(
        self,
        rows: int,
        context_len: int,
        block_size: int,
        rope_switch: int | None = None,
        cross_len: int = 0,
        *,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        """Make a table without sequences.

        Args:
            rows: most sequences.
            context_len: most tokens of a sequence.
            block_size: tokens of a block.
            rope_switch: see `LanguageModel.rope_switch`.
            cross_len: encoded positions of the longest item that a sequence attends to; 0: none.
            windows: positions that tokens attend to in each group of layers; None: all.
        """
        self.block_size = block_size
        self._rope_switch = rope_switch or 0
        self.tokens = np.zeros((rows, context_len), np.int32)
        self.lengths = np.zeros(rows, np.int32)
        self.rope_offsets = np.zeros(rows, np.int64)
        self.rows_with_rope_offset: set[int] = set()
        self.prompt_positions: dict[int, NDArray[np.int64]] = {}
        self._groups = len(windows)
        self._windows = [(group, window) for group, window in enumerate(windows) if window is not None]
        self.blocks = np.zeros((max(1, self._groups), rows, -(-context_len // block_size)), np.int32)
        self._unseen = np.zeros((max(1, self._groups), rows), np.int32)  # first blocks that are out of sight
        self.num_blocks = np.zeros(rows, np.int32)
        self.cross_blocks = np.zeros((rows, -(-cross_len // block_size)), np.int32)
        self.cross_lengths = np.zeros(rows, np.int64)
        self.lora_ids: dict[int, int] = {}
        self.rows_with_prompt_logprobs: set[int] = set()
        self.rows_with_token_probs: set[int] = set()
        self._rows: dict[int, Row] = {}
        self._index: dict[str, int] = {}
        self._free = list(range(rows - 1, -1, -1))

    def __getitem__(self, row: int) -> Row:
        return self._rows[row]

    def holder(self, row: int) -> Row | None:
        """What a row holds; None if it is free."""
        return self._rows.get(row)

    def params_of(self, rows: Iterable[int]) -> list[SamplingParams]:
        """The sampling parameters of rows whose sequences generate."""
        return cast("list[SamplingParams]", [self._rows[row].params for row in rows])

    def row_of(self, request_id: str) -> int:
        """Row of a sequence in the batch."""
        return self._index[request_id]

    def apply(self, plan: StepPlan) -> Changes:
        """Apply a plan's changes to the batch."""
        freed = [self._remove(request_id) for request_id in plan.removed]
        filled = [self._add(new) for new in plan.new]
        extended = [self._extend(extension) for extension in plan.prompt_extensions]
        for item in plan.scheduled:
            if item.new_blocks:
                self._append_blocks(self._index[item.request_id], item.new_blocks)
            if self._windows and not any(span.ignores_windows for span in item.bidirectional):
                self._hide_unseen(self._index[item.request_id], item.start)
            if item.draft:  # after the known tokens; sampled tokens then overwrite it
                known = self.lengths[self._index[item.request_id]]
                self.tokens[self._index[item.request_id], known : known + len(item.draft)] = item.draft
        return Changes(freed, filled, extended)

    def _append_blocks(self, row: int, new_blocks: tuple[int, ...]) -> None:
        begin = self.num_blocks[row]
        end = begin + len(new_blocks) // self._groups
        self.blocks[:, row, begin:end] = np.reshape(new_blocks, (self._groups, -1))
        self.num_blocks[row] = end

    def _hide_unseen(self, row: int, start: int) -> None:
        """Forget the blocks that no token from position `start` on attends to: other sequences may have them."""
        for group, window in self._windows:
            first = max(0, start - window + 1) // self.block_size
            if first > self._unseen[group, row]:
                self.blocks[group, row, :first] = self.blocks[group, row, first]
                self._unseen[group, row] = first

    def blocks_of(self, row: int, start: int = 0) -> list[int]:
        """Return the blocks of a row that hold its positions from `start` on, of all groups."""
        return list(self.blocks[:, row, start // self.block_size : self.num_blocks[row]].flatten().tolist())

    def append(self, row: int, token: int) -> None:
        """Append a sampled token."""
        if self.lengths[row] < self.tokens.shape[1]:
            self.tokens[row, self.lengths[row]] = token
            self.lengths[row] += 1

    def append_unknown(self, row: int) -> int:
        """Append a token that was sampled, but whose id only the device knows yet: -1 - row stands for it.

        Returns:
            Its position, for `set_token`.
        """
        position = int(self.lengths[row])
        self.append(row, -1 - row)
        return position

    def set_token(self, row: int, position: int, token: int) -> None:
        """Set the id of a token that was unknown."""
        if position < self.tokens.shape[1]:
            self.tokens[row, position] = token

    def known_tokens(self, row: int) -> NDArray[np.int32]:
        """Prompt and output so far."""
        return self.tokens[row, : self.lengths[row]]

    def check(self) -> None:
        """Assert that rows, index and free list are consistent."""
        assert sorted(self._index.values()) == sorted(self._rows), "rows and index differ"
        assert len(self._free) + len(self._rows) == len(self.lengths), "rows got lost"

    def _add(self, new: NewSequence) -> int:
        row = self._free.pop()
        self._rows[row] = Row(new.request_id, new.params, new.prompt_len, new.prompt_logprobs)
        self._index[new.request_id] = row
        if new.prompt_logprobs is not None:
            self.rows_with_prompt_logprobs.add(row)
        self.tokens[row, : len(new.tokens)] = new.tokens
        self.lengths[row] = len(new.tokens)
        self._place(row, new.positions, self._rope_switch if new.uses_long_rope else 0)
        if new.lora_id is not None:
            self.lora_ids[row] = new.lora_id
        self.num_blocks[row] = 0
        self._unseen[:, row] = 0
        if new.cross_attention is not None:
            self.cross_blocks[row, : len(new.cross_attention.blocks)] = new.cross_attention.blocks
            self.cross_lengths[row] = new.cross_attention.length
        if isinstance(new.params, SamplingParams) and new.params.token_probs is not None:
            self.rows_with_token_probs.add(row)
        return row

    def _extend(self, extension: PromptExtension) -> int:
        row = self._index[extension.request_id]
        begin = int(self.lengths[row])
        self.tokens[row, begin : begin + len(extension.tokens)] = extension.tokens
        self.lengths[row] = self._rows[row].prompt_len = begin + len(extension.tokens)
        if extension.positions is not None:
            self._place(row, extension.positions, 0)  # a sequence with a long rope enters the batch anew
        return row

    def _place(self, row: int, positions: RotaryPositions | None, offset: int) -> None:
        """Set the indices of a row's tokens into the rope tables. `offset`: added to all of them."""
        if positions is not None:
            self.prompt_positions[row] = positions.tokens.astype(np.int64) + offset
            offset += positions.following - self._rows[row].prompt_len
        self.rope_offsets[row] = offset
        if offset:
            self.rows_with_rope_offset.add(row)
        else:
            self.rows_with_rope_offset.discard(row)

    def _remove(self, request_id: str) -> int:
        row = self._index.pop(request_id)
        del self._rows[row]
        self.rows_with_prompt_logprobs.discard(row)
        self.rows_with_token_probs.discard(row)
        self.rows_with_rope_offset.discard(row)
        self.prompt_positions.pop(row, None)
        self.lora_ids.pop(row, None)
        self._free.append(row)
        return row
