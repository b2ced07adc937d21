"""Stages that forbid single tokens or add a bias to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Generic, TypeVar

import torch
from torch import Tensor

from quire.engine.execution.table import RequestTable
from quire.engine.wire.protocol import SamplingParams

State = TypeVar("State")


class _ByRow(ABC, Generic[State]):
    """A stage whose state is one value for each row that uses it."""

    def __init__(self) -> None:
        self._state: dict[int, State] = {}

    @property
    def rows(self) -> Collection[int]:
        """See `Stage`."""
        return self._state

    def add(self, row: int, params: SamplingParams, table: RequestTable) -> None:
        """See `Stage`."""
        state = self._make(params)
        if state is not None:
            self._state[row] = state

    def remove(self, row: int) -> None:
        """See `Stage`."""
        self._state.pop(row, None)

    def observe(self, row: int, token: int) -> None:
        """See `Stage`."""

    def apply(self, logits: Tensor, row: int, table: RequestTable) -> None:
        """See `Stage`."""
        self._change(logits, self._state[row], row, table)

    @abstractmethod
    def _make(self, params: SamplingParams) -> State | None:
        """The state of a row with these params; None if it does not use the stage."""

    @abstractmethod
    def _change(self, logits: Tensor, state: State, row: int, table: RequestTable) -> None:
        """Change the logits (vocab,) of one row in place."""


class AllowedTokens(_ByRow[Tensor]):
    """allowed_token_ids: all other tokens get -inf. The state is the allowed ids."""

    def _make(self, params: SamplingParams) -> Tensor | None:
        return torch.tensor(params.allowed_token_ids) if params.allowed_token_ids else None

    def _change(self, logits: Tensor, state: Tensor, row: int, table: RequestTable) -> None:
        kept = logits[state]
        logits.fill_(-torch.inf)
        logits[state] = kept


class LogitBias(_ByRow[tuple[Tensor, Tensor]]):
    """logit_bias: added to the logits of single tokens."""

    def _make(self, params: SamplingParams) -> tuple[Tensor, Tensor] | None:
        if not params.logit_bias:
            return None
        ids, bias = list(params.logit_bias), list(params.logit_bias.values())
        return torch.tensor(ids), torch.tensor(bias, dtype=torch.float32)

    def _change(self, logits: Tensor, state: tuple[Tensor, Tensor], row: int, table: RequestTable) -> None:
        ids, bias = state
        logits[ids] += bias


class BadWords(_ByRow[tuple[tuple[int, ...], ...]]):
    """bad_words: the last token of each word gets -inf where the output ends with the tokens before it."""

    def _make(self, params: SamplingParams) -> tuple[tuple[int, ...], ...] | None:
        return params.bad_words or None

    def _change(self, logits: Tensor, state: tuple[tuple[int, ...], ...], row: int, table: RequestTable) -> None:
        output = table.known_tokens(row)[table[row].prompt_len :]
        for *head, last in state:
            if len(head) <= len(output) and output[len(output) - len(head) :].tolist() == head:
                logits[last] = -torch.inf


class MinTokens(_ByRow[tuple[int, Tensor]]):
    """min_tokens: end and stop tokens get -inf until so many tokens were generated."""

    def _make(self, params: SamplingParams) -> tuple[int, Tensor] | None:
        ends = params.eos_token_ids + params.stop_token_ids
        return (params.min_tokens, torch.tensor(ends)) if params.min_tokens and ends else None

    def _change(self, logits: Tensor, state: tuple[int, Tensor], row: int, table: RequestTable) -> None:
        min_tokens, ends = state
        if int(table.lengths[row]) - table[row].prompt_len < min_tokens:
            logits[ends] = -torch.inf
