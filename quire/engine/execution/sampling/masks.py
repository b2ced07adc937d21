"""Logits processors that mask tokens or add a bias to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from quire.engine.client.sampling_params import SamplingParams, TimestampRule
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.sampling.logits_processor import LogitsProcessor
from quire.engine.execution.sampling.row_settings import token_biases
from quire.kernels.sampling import Masks, apply_token_bitmask

State = TypeVar("State")


class _ByRow(LogitsProcessor, ABC, Generic[State]):
    """A logits processor whose state is one value for each row that uses it."""

    def __init__(self) -> None:
        self._state: dict[int, State] = {}

    @property
    @override
    def rows(self) -> Collection[int]:
        return self._state

    @override
    def add(self, row: int, params: SamplingParams, table: RequestTable) -> None:
        state = self._make(params)
        if state is not None:
            self._state[row] = state

    @override
    def remove(self, row: int) -> None:
        self._state.pop(row, None)

    @override
    def observe(self, row: int, token: int) -> None:
        pass

    @override
    def apply(self, logits: Tensor, row: int, table: RequestTable) -> None:
        self._change(logits, self._state[row], row, table)

    @abstractmethod
    def _make(self, params: SamplingParams) -> State | None:
        """The state of a row with these params; None if it does not use the processor."""

    @abstractmethod
    def _change(self, logits: Tensor, state: State, row: int, table: RequestTable) -> None:
        """Change the logits (vocab,) of one row in place."""


@dataclass(frozen=True, slots=True)
class _BadWords:
    """The words of one row.

    Attributes:
        single: words of one token, (words,).
        longer: the tokens of other words but the last, and the last, by the last but one.
        longest: tokens of the longest word.
    """

    single: Tensor
    longer: Mapping[int, Sequence[tuple[list[int], int]]]
    longest: int


@dataclass(frozen=True, slots=True)
class _Biases:
    """The biases of one row, in descending order of their limits.

    Attributes:
        tokens: (biases,) int64; values: (biases,) float32.
        ends: the negated limits.
    """

    tokens: Tensor
    values: Tensor
    ends: Sequence[int]


class AllowedTokens(_ByRow[Masks]):
    """allowed_tokens: all other tokens get -inf. The state is their bitmask (1, words)."""

    def _make(self, params: SamplingParams) -> Masks | None:
        return None if params.allowed_tokens is None else params.allowed_tokens[None].copy()  # torch wants it writable

    def _change(self, logits: Tensor, state: Masks, row: int, table: RequestTable) -> None:
        apply_token_bitmask(logits[None], state, [(0, 0)])


class Biases(_ByRow[_Biases]):
    """Add to the logits of single tokens, see `token_biases`."""

    def _make(self, params: SamplingParams) -> _Biases | None:
        biases = sorted(token_biases(params), key=lambda bias: -bias.limit)
        if not biases:
            return None
        return _Biases(
            torch.tensor([bias.token for bias in biases]),
            torch.tensor([bias.value for bias in biases], dtype=torch.float32),
            [-bias.limit for bias in biases],
        )

    def _change(self, logits: Tensor, state: _Biases, row: int, table: RequestTable) -> None:
        generated = int(table.lengths[row]) - table[row].prompt_len
        count = bisect_left(state.ends, -generated)  # of those whose limit is greater
        if count:
            logits.index_add_(0, state.tokens[:count], state.values[:count])


class BadWords(_ByRow[_BadWords]):
    """bad_words: the last token of each word gets -inf where the output ends with the tokens before it."""

    def _make(self, params: SamplingParams) -> _BadWords | None:
        if not params.bad_words:
            return None
        longer: dict[int, list[tuple[list[int], int]]] = {}
        for *head, last in params.bad_words:
            if head:
                longer.setdefault(head[-1], []).append((head, last))
        single = torch.tensor([word[0] for word in params.bad_words if len(word) == 1], dtype=torch.int64)
        return _BadWords(single, longer, max(map(len, params.bad_words)))

    def _change(self, logits: Tensor, state: _BadWords, row: int, table: RequestTable) -> None:
        logits[state.single] = -torch.inf
        output = table.known_tokens(row)[table[row].prompt_len :]
        words = state.longer.get(int(output[-1]), ()) if len(output) else ()
        tail = output[-state.longest :].tolist() if words else []
        for head, last in words:
            if tail[-len(head) :] == head:
                logits[last] = -torch.inf


class Timestamps(_ByRow[TimestampRule]):
    """timestamp_rule: tokens that would break the pairs or the order of timestamps get -inf."""

    def _make(self, params: SamplingParams) -> TimestampRule | None:
        return params.timestamp_rule

    def _change(self, logits: Tensor, state: TimestampRule, row: int, table: RequestTable) -> None:
        output = table.known_tokens(row)[table[row].prompt_len :]
        logits[state.no_timestamps] = -torch.inf
        if len(output):
            _continue_pairs(logits, output, state)
        else:
            logits[: state.begin] = -torch.inf
            if state.max_initial is not None:
                logits[state.begin + state.max_initial + 1 :] = -torch.inf
        # All timestamps together are more likely than any other token. What normalizes them cancels out.
        if bool(logits[state.begin :].logsumexp(0) > logits[: state.begin].max()):
            logits[: state.begin] = -torch.inf


def _continue_pairs(logits: Tensor, output: NDArray[np.int32], rule: TimestampRule) -> None:
    """Forbid tokens that cannot follow the output: a third timestamp, text inside a pair, and an earlier time."""
    stamps = output[output >= rule.begin]
    if not len(stamps):
        return
    after_stamp = output[-1] >= rule.begin
    complete = len(output) < 2 or output[-2] >= rule.begin
    if after_stamp and complete:
        logits[rule.begin :] = -torch.inf
    elif after_stamp:
        logits[: rule.end] = -torch.inf
    # A segment begins where the one before ended, and does not end where it begins.
    earliest = int(stamps[-1]) + (0 if after_stamp and not complete else 1)
    logits[rule.begin : earliest] = -torch.inf
