"""Repetition, presence and frequency penalties."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from quire.engine.client.sampling_params import SamplingParams
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.sampling.logits_processor import LogitsProcessor
from quire.engine.execution.sampling.row_settings import is_penalized
from quire.kernels.adjust_logits import IN_PROMPT


@dataclass(slots=True)
class _Seen:
    """The tokens that occurred in a row; penalties change the logits of these only.

    Attributes:
        params: has the penalties.
        counts: (vocab,) int32 how often each token was generated; plus `IN_PROMPT` if it occurs in the prompt.
        tokens: int32 the tokens with a count, and memory for more; `distinct`: how many they are.
    """

    params: SamplingParams
    counts: NDArray[np.int32]
    tokens: NDArray[np.int32]
    distinct: int

    def observe(self, token: int) -> None:
        """Count a token that was generated."""
        if self.counts[token] == 0:
            if self.distinct == len(self.tokens):
                self.tokens = np.resize(self.tokens, 2 * self.distinct + 1)
            self.tokens[self.distinct] = token
            self.distinct += 1
        self.counts[token] += 1


class Penalties(LogitsProcessor):
    """Repetition counts prompt and output (Keskar et al. 2019), presence and frequency the output only (OpenAI)."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._seen: dict[int, _Seen] = {}

    @property
    @override
    def rows(self) -> Collection[int]:
        return self._seen

    @override
    def add(self, row: int, params: SamplingParams, table: RequestTable) -> None:
        if not is_penalized(params):
            return
        prompt, output = np.split(table.known_tokens(row), [table[row].prompt_len])
        counts = np.bincount(output, minlength=self._vocab_size).astype(np.int32)
        counts[prompt] |= IN_PROMPT
        tokens = np.flatnonzero(counts).astype(np.int32)
        self._seen[row] = _Seen(params, counts, tokens, len(tokens))

    @override
    def remove(self, row: int) -> None:
        self._seen.pop(row, None)

    @override
    def observe(self, row: int, token: int) -> None:
        self._seen[row].observe(token)

    @override
    def apply(self, logits: Tensor, row: int, table: RequestTable) -> None:
        seen = self._seen[row]
        params, tokens, of_vocab = seen.params, seen.tokens[: seen.distinct], logits.numpy()
        values, generated = of_vocab[tokens], seen.counts[tokens] & ~IN_PROMPT
        if params.repetition_penalty != 1.0:
            penalty = np.float32(params.repetition_penalty)
            values = np.where(values > 0, values / penalty, values * penalty)
        if params.frequency_penalty:
            values -= np.float32(params.frequency_penalty) * generated.astype(np.float32)
        if params.presence_penalty:
            values -= np.float32(params.presence_penalty) * (generated > 0)
        of_vocab[tokens] = values
