"""Repetition, presence and frequency penalties."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.client.sampling_params import SamplingParams
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.sampling.logits_processor import LogitsProcessor
from quire.engine.execution.sampling.row_settings import is_penalized


@dataclass(slots=True)
class _Seen:
    """Tokens of a row: whether each occurs in the prompt, and how often it was generated; both (vocab,)."""

    params: SamplingParams
    in_prompt: Tensor
    generated: Tensor


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
        in_prompt = torch.from_numpy(np.bincount(prompt, minlength=self._vocab_size) > 0)
        generated = torch.from_numpy(np.bincount(output, minlength=self._vocab_size).astype(np.float32))
        self._seen[row] = _Seen(params, in_prompt, generated)

    @override
    def remove(self, row: int) -> None:
        self._seen.pop(row, None)

    @override
    def observe(self, row: int, token: int) -> None:
        self._seen[row].generated[token] += 1

    @override
    def apply(self, logits: Tensor, row: int, table: RequestTable) -> None:
        _penalize(logits, self._seen[row])


def _penalize(logits: Tensor, seen: _Seen) -> None:
    params = seen.params
    occurred = seen.generated > 0
    if params.repetition_penalty != 1.0:
        penalty = params.repetition_penalty
        penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits.copy_(torch.where(seen.in_prompt | occurred, penalized, logits))
    if params.frequency_penalty:
        logits.sub_(seen.generated, alpha=params.frequency_penalty)
    if params.presence_penalty:
        logits.sub_(occurred.float(), alpha=params.presence_penalty)
