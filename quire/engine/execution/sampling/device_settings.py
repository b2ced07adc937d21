"""Sampling parameters of the rows of the request table, and what was generated, in tensors on a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.engine.execution.pinned import pinned_empty
from quire.engine.wire.sampling_params import SamplingParams
from quire.kernels.adjust_logits import IN_PROMPT, Biases, Penalties, TokenCounts
from quire.kernels.choose_tokens import ChoiceSettings
from quire.kernels.sampling import mask_words
from quire.kernels.sampling_state import random_state, randoms_at

MAX_BIASES = 1024  # of a row: biases, end tokens that min_tokens forbids, begin_suppress_tokens
_ALWAYS = (1 << 31) - 1  # the limit of biases that do not end
_TEMPERATURE, _LOG_MIN_P, _TOP_P, _REPETITION, _FREQUENCY, _PRESENCE = range(6)  # of `floats`
_TOP_K, _BIASES, _COUNTS, _MASK = range(4)  # of `integers`
_RANDOM_STATE, _POSITION = range(2)  # of `states`


@dataclass(frozen=True, slots=True)
class RowUse:
    """What is needed to sample a token of a row."""

    random: bool
    ranked: bool
    biased: bool
    penalized: bool
    masked: bool
    logprobs: int | None

    @property
    def adjusts(self) -> bool:
        """Whether logits change before a token is chosen."""
        return self.biased or self.penalized or self.masked


def has_settings(params: SamplingParams) -> bool:
    """Whether these tensors can hold all that the sampling of a request depends on.

    Grammars, bad words and rules of timestamps depend on the tokens before in ways that only the host follows.
    """
    follows = bool(params.grammar or params.bad_words) or params.timestamp_rule is not None
    return not follows and len(_biases(params)) <= MAX_BIASES


def settings_bytes(rows: int, vocab_size: int) -> int:
    """Bytes of device memory that `DeviceSettings` takes at most: if every row has penalties, a mask and biases.

    While the counts of tokens grow, what they had before takes half as much once more.
    """
    return 4 * rows * (vocab_size * 3 // 2 + mask_words(vocab_size) * 3 // 2 + 3 * MAX_BIASES)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of an array, which the device makes in the background."""
    source = pinned_empty(array.shape, torch.from_numpy(array).dtype, device)
    source.numpy()[...] = array
    return source.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence that was put into a row of the table; its known tokens are int32."""

    row: int
    params: SamplingParams
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]


class _Slots:
    """Rows of a tensor for those rows of the table that need one; there become more when they are needed."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.values = torch.zeros((0, width), dtype=torch.int32, device=device)
        self._free: list[int] = []
        self._held: dict[int, int] = {}

    def take(self, row: int) -> int:
        """The slot of a row, with any content."""
        if not self._free:
            count = len(self.values)
            added = torch.zeros((max(4, count), self.values.shape[1]), dtype=torch.int32, device=self.values.device)
            self.values = torch.cat((self.values, added))
            self._free = list(range(len(self.values) - 1, count - 1, -1))
        self._held[row] = self._free.pop()
        return self._held[row]

    def release(self, row: int) -> None:
        """A row was freed, which may have a slot."""
        slot = self._held.pop(row, None)
        if slot is not None:
            self._free.append(slot)


class DeviceSettings:
    """Written when rows of the table change; what a token changes is written by `record_tokens` on the device.

    Attributes:
        uses: what the sampling of each row needs, by row.
        positions: (rows,) int64 tokens that were generated.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        """`rows`: of the request table."""
        self.uses: dict[int, RowUse] = {}
        self._device = device
        self._floats = torch.zeros((6, rows), dtype=torch.float32, device=device)
        self._integers = torch.zeros((4, rows), dtype=torch.int32, device=device)
        self._states = torch.zeros((2, rows), dtype=torch.int64, device=device)
        self.positions = self._states[_POSITION]
        self._counts = _Slots(vocab_size, device)
        self._masks = _Slots(mask_words(vocab_size), device)
        self._tables: tuple[Tensor, Tensor, Tensor] | None = None  # of biases

    @property
    def masks(self) -> Tensor:
        """Bitmasks of allowed tokens: (slots, words) int32."""
        return self._masks.values

    @property
    def seen(self) -> TokenCounts:
        """Tokens of the rows that have penalties."""
        return TokenCounts(self._integers[_COUNTS], self._counts.values)

    @property
    def penalties(self) -> Penalties:
        """Penalties of all rows."""
        return Penalties(self._floats[_REPETITION], self._floats[_FREQUENCY], self._floats[_PRESENCE])

    @property
    def biases(self) -> Biases:
        """Biases of all rows; a row must have some."""
        assert self._tables is not None
        return Biases(*self._tables, self._integers[_BIASES])

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
        self._counts.release(row)
        self._masks.release(row)

    def add(self, filled: Sequence[NewRow]) -> None:
        """Rows were filled with sequences that `has_settings` accepts."""
        if not filled:
            return
        integers = [self._add(one) for one in filled]
        rows = to_device(np.array([one.row for one in filled], np.int64), self._device)
        parts = (
            (self._floats, [_floats(one.params) for one in filled], np.float32),
            (self._integers, integers, np.int32),
            (self._states, [(random_state(one.params.seed or 0), len(one.output)) for one in filled], np.int64),
        )
        for target, values, dtype in parts:
            target.index_copy_(1, rows, to_device(np.ascontiguousarray(np.array(values, dtype).T), self._device))

    def _add(self, new: NewRow) -> tuple[int, int, int, int]:
        """Write what a row has of its own; returns its integers."""
        params, biases = new.params, _biases(new.params)
        penalized = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)
        masked = params.allowed_tokens is not None
        ranked = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1)
        self.uses[new.row] = RowUse(
            random=params.temperature > 0 and not ranked,
            ranked=ranked,
            biased=bool(biases),
            penalized=penalized,
            masked=masked,
            logprobs=params.logprobs,
        )
        if biases:
            self._write_biases(new.row, biases)
        counts = self._write_counts(new) if penalized else -1
        mask = -1
        if params.allowed_tokens is not None:
            mask = self._masks.take(new.row)
            self._masks.values[mask].copy_(to_device(params.allowed_tokens.view(np.int32), self._device))
        return min(params.top_k, _ALWAYS), len(biases), counts, mask

    def _write_biases(self, row: int, biases: Sequence[tuple[int, float, int]]) -> None:
        if self._tables is None:
            shape = (self._floats.shape[1], MAX_BIASES)
            dtypes = (torch.int32, torch.float32, torch.int32)
            tokens, values, limits = (torch.zeros(shape, dtype=dtype, device=self._device) for dtype in dtypes)
            self._tables = tokens, values, limits
        for table, column, dtype in zip(
            self._tables, zip(*biases, strict=True), (np.int32, np.float32, np.int32), strict=True
        ):
            table[row, : len(column)].copy_(to_device(np.array(column, dtype), self._device))

    def _write_counts(self, new: NewRow) -> int:
        """The slot with the tokens of a row."""
        slot = self._counts.take(new.row)
        counts = self._counts.values[slot]
        counts.zero_()
        counts.index_fill_(0, to_device(new.prompt.astype(np.int64), self._device), IN_PROMPT)
        output = to_device(new.output.astype(np.int64), self._device)
        counts.scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        return slot


def _floats(params: SamplingParams) -> tuple[float, ...]:
    log_min_p = math.log(params.min_p) if params.min_p else -math.inf
    penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    return (params.temperature, log_min_p, params.top_p, *penalties)


def _biases(params: SamplingParams) -> list[tuple[int, float, int]]:
    """Tokens with what is added to their logits, and the position from which on it is not."""
    ends = {*params.eos_token_ids, *params.stop_token_ids} if params.min_tokens else set[int]()
    return [
        *((token, bias, _ALWAYS) for token, bias in params.logit_bias.items()),
        *((token, -math.inf, params.min_tokens) for token in ends),
        *((token, -math.inf, 1) for token in {*params.begin_suppress_tokens}),
    ]
