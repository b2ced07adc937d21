"""Sampling parameters of the rows of the request table, and what was generated, in tensors on a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.engine.client.sampling_params import SamplingParams
from quire.engine.execution.pinned import to_device
from quire.engine.execution.sampling.row_settings import MAX_BIASES, RowUse, TokenBias, row_use, token_biases
from quire.kernels.adjust_logits import IN_PROMPT, Biases, Penalties, TokenCounts
from quire.kernels.sampling import ChoiceSettings, mask_words
from quire.kernels.sampling_state import random_state, randoms_at

_TEMPERATURE, _LOG_MIN_P, _TOP_P, _REPETITION, _FREQUENCY, _PRESENCE = range(6)  # of `floats`
_TOP_K, _BIASES, _COUNTS, _MASK = range(4)  # of `integers`
_RANDOM_STATE, _POSITION = range(2)  # of `states`


def settings_bytes(rows: int, vocab_size: int) -> int:
    """Bytes of device memory that `DeviceSettings` takes: almost all of them for counts of tokens."""
    return 4 * rows * (vocab_size + mask_words(vocab_size) + 3 * MAX_BIASES)


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence that was put into a row of the table; its known tokens are int32."""

    row: int
    params: SamplingParams
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]


class DeviceSettings:
    """Written when rows of the table change; what a token changes is written by `record_tokens` on the device.

    All memory is allocated at the start, so that a request cannot fail for want of it.

    Attributes:
        uses: what the sampling of each row needs, by row.
        positions: (rows,) int64 tokens that were generated.
        masks: (rows, words) int32 bitmasks of allowed tokens, for `mask_of_row`.
        seen: the tokens of rows that have penalties.
        penalties: of all rows.
        biases: of all rows.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        """`rows`: of the request table."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.uses: dict[int, RowUse] = {}
        self._device = device
        floats = self._floats = zeros(6, rows, dtype=torch.float32)
        integers = self._integers = zeros(4, rows)
        self._states = zeros(2, rows, dtype=torch.int64)
        self.positions = self._states[_POSITION]
        self.masks = zeros(rows, mask_words(vocab_size))
        self.seen = TokenCounts(integers[_COUNTS], zeros(rows, vocab_size))
        self.penalties = Penalties(floats[_REPETITION], floats[_FREQUENCY], floats[_PRESENCE])
        self.biases = Biases(
            tokens=zeros(rows, MAX_BIASES),
            values=zeros(rows, MAX_BIASES, dtype=torch.float32),
            limits=zeros(rows, MAX_BIASES),
            counts=integers[_BIASES],
        )

    def choice(self, rows: Tensor, positions: Tensor, uses: Sequence[RowUse]) -> ChoiceSettings:
        """How a token is chosen at positions (n,) int64 of rows (n,) int64 of the table."""
        floats, integers = self._floats.index_select(1, rows), self._integers.index_select(1, rows)
        return ChoiceSettings(
            temperatures=floats[_TEMPERATURE],
            randoms=randoms_at(self._states[_RANDOM_STATE], rows, positions),
            log_min_p=floats[_LOG_MIN_P],
            top_k=integers[_TOP_K],
            top_p=floats[_TOP_P],
            random=any(use.random for use in uses),
            ranked=any(use.ranked for use in uses),
        )

    def mask_of_row(self, rows: Tensor) -> Tensor:
        """(n,) int32: the row of `masks` of each of `rows`; -1 for those without one."""
        return self._integers[_MASK].index_select(0, rows)

    def remove(self, row: int) -> None:
        """A row was freed."""
        self.uses.pop(row, None)

    def add(self, filled: Sequence[NewRow]) -> None:
        """Rows were filled with sequences that fit the device."""
        if not filled:
            return
        integers = [self._add(new_row) for new_row in filled]
        rows = to_device(np.array([new_row.row for new_row in filled], np.int64), self._device)
        parts = (
            (self._floats, [_floats(new_row.params) for new_row in filled], np.float32),
            (self._integers, integers, np.int32),
            (
                self._states,
                [(random_state(new_row.params.seed or 0), len(new_row.output)) for new_row in filled],
                np.int64,
            ),
        )
        for target, values, dtype in parts:
            target.index_copy_(1, rows, to_device(np.ascontiguousarray(np.array(values, dtype).T), self._device))

    def _add(self, new: NewRow) -> tuple[int, int, int, int]:
        """Write what a row has of its own; returns its integers."""
        params, biases = new.params, token_biases(new.params)
        use = self.uses[new.row] = row_use(params)
        if biases:
            self._write_biases(new.row, biases)
        if use.penalized:
            self._write_counts(new)
        if params.allowed_tokens is not None:
            self.masks[new.row].copy_(to_device(params.allowed_tokens.view(np.int32), self._device))
        return params.top_k, len(biases), new.row if use.penalized else -1, new.row if use.masked else -1

    def _write_biases(self, row: int, biases: Sequence[TokenBias]) -> None:
        tables = (self.biases.tokens, np.int32), (self.biases.values, np.float32), (self.biases.limits, np.int32)
        for (table, dtype), column in zip(tables, zip(*biases, strict=True), strict=True):
            table[row, : len(column)].copy_(to_device(np.array(column, dtype), self._device))

    def _write_counts(self, new: NewRow) -> None:
        """Count the known tokens of a row."""
        counts = self.seen.counts[new.row]
        counts.zero_()
        counts.index_fill_(0, to_device(new.prompt.astype(np.int64), self._device), IN_PROMPT)
        output = to_device(new.output.astype(np.int64), self._device)
        counts.scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))


def _floats(params: SamplingParams) -> tuple[float, ...]:
    log_min_p = math.log(params.min_p) if params.min_p else -math.inf
    penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    return (params.temperature, log_min_p, params.top_p, *penalties)
