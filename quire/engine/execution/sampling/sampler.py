"""Sampler: stages in order, then a choice, and the log-probabilities that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from quire.engine.execution.sampling.choice import choose, uniform
from quire.engine.execution.sampling.logprobs import report
from quire.engine.execution.sampling.masks import AllowedTokens, BadWords, LogitBias, MinTokens
from quire.engine.execution.sampling.penalties import Penalties
from quire.engine.execution.sampling.stage import Stage
from quire.engine.execution.sampling.structure import Structure, Walk
from quire.engine.execution.table import RequestTable
from quire.engine.wire.protocol import SamplingParams, TokenLogprobs


class Choice(NamedTuple):
    """A token, its log-probabilities if they were asked for, and why none is to be had if so."""

    token: int
    logprobs: TokenLogprobs | None
    error: str | None = None


class Sampler:
    """Chooses the next token of each sequence that has caught up."""

    def __init__(
        self, table: RequestTable, vocab_size: int, walk: Callable[[SamplingParams], Walk | None] = lambda _: None
    ) -> None:
        """`walk` begins the walk along the grammar of a request that has one."""
        self._table = table
        self._structure = Structure(walk, vocab_size)
        self._stages: list[Stage] = [
            AllowedTokens(), BadWords(), LogitBias(), MinTokens(), Penalties(vocab_size), self._structure,
        ]  # fmt: skip

    def update(self, emptied: Iterable[int], filled: Iterable[int]) -> None:
        """Rows of the table were emptied, then some were filled."""
        for stage in self._stages:
            for row in emptied:
                stage.remove(row)
            for row in filled:
                stage.add(row, self._table[row].params, self._table)
        self._structure.look_ahead()

    def sample(self, logits: Tensor, rows: Sequence[int]) -> list[Choice]:
        """The next tokens of `rows` from their logits (rows, vocab) float32, which are changed."""
        table = self._table
        params = [table[row].params for row in rows]
        wanted = [i for i, one in enumerate(params) if one.logprobs is not None]
        raw = logits[wanted].clone() if wanted else None
        for stage in self._stages:
            stage.apply(logits, rows, table)
        randoms = [
            uniform(one.seed or 0, int(table.lengths[row]) - table[row].prompt_len) if one.temperature > 0 else 0.0
            for row, one in zip(rows, params, strict=True)
        ]
        errors = self._structure.errors(rows)
        tokens = choose(logits, params, randoms)
        logprobs: dict[int, TokenLogprobs] = {}
        if raw is not None:
            most = max(params[i].logprobs or 0 for i in wanted)
            reports = report(raw, [tokens[i] for i in wanted], most)
            logprobs = {i: _first(entry, params[i].logprobs or 0) for i, entry in zip(wanted, reports, strict=True)}
        for row, token in zip(rows, tokens, strict=True):
            table.append(row, token)
            for stage in self._stages:
                stage.observe(row, token)
        self._structure.look_ahead()
        return [Choice(token, logprobs.get(i), errors.get(i)) for i, token in enumerate(tokens)]


def _first(entry: TokenLogprobs, alternatives: int) -> TokenLogprobs:
    end = alternatives + 1
    return TokenLogprobs(entry.token_ids[:end], entry.logprobs[:end], entry.ranks[:end])
