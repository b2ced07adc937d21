"""Sampler: logits processors change the logits in order, then a token is chosen and its log-probability reported."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

from torch import Tensor
from typing_extensions import override

from quire.engine.client.protocol import TokenLogprobs
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.sampling.grammar import GrammarProcessor, GrammarState
from quire.engine.execution.sampling.logits_processor import LogitsProcessor, RowState
from quire.engine.execution.sampling.logprobs import top_logprobs
from quire.engine.execution.sampling.masks import AllowedTokens, BadWords, Biases, Timestamps
from quire.engine.execution.sampling.penalties import Penalties
from quire.engine.execution.sampling.pending import KnownTokens, PendingTokens, SampledToken, TokenSampler
from quire.engine.scheduling.plan import NOT_FINITE, SequenceError
from quire.kernels.sampling import NO_TOKEN, TokenChoices, argmax, sample
from quire.kernels.sampling_state import uniform

logger = logging.getLogger(__name__)
_MOST_ENDS = 64  # tokens that end a sequence, of which a kernel chooses the tokens
GrammarStates = Callable[[SamplingParams], GrammarState | None]  # initial states of grammars; None without a grammar
P = ParamSpec("P")
T = TypeVar("T")


class Sampler(TokenSampler):
    """Samples on the CPU: tokens are known at once. Logits of other devices are copied.

    A failure in one sequence ends that sequence with an error; the others continue.
    """

    max_steps_in_flight = 1

    def __init__(
        self,
        table: RequestTable,
        vocab_size: int,
        grammar_states: GrammarStates = lambda _: None,
    ) -> None:
        self._table = table
        self._grammars = GrammarProcessor(grammar_states, vocab_size)
        self._processors: list[LogitsProcessor] = [
            AllowedTokens(),
            BadWords(),
            Biases(),
            Penalties(vocab_size),
            Timestamps(),  # last: it compares the tokens that the others allow
        ]
        self._stateful: list[RowState] = [*self._processors, self._grammars]
        self._processors_in_use: list[LogitsProcessor] = []  # by the rows of the table
        self._states_in_use: list[RowState] = []
        self._errors: dict[int, SequenceError] = {}  # by row

    @override
    def update(self, freed: Iterable[int], filled: Iterable[int]) -> None:
        for row in freed:
            self._errors.pop(row, None)
            for processor in self._stateful:
                processor.remove(row)
        for row in filled:
            params = self._table[row].params
            if isinstance(params, SamplingParams):
                for processor in self._stateful:
                    self._contain(row, processor.add, row, params, self._table)
        self._processors_in_use = [processor for processor in self._processors if processor.rows]
        self._states_in_use = [state for state in self._stateful if state.rows]
        self._grammars.start_masks()

    @override
    def start(self, logits: Tensor, rows: Sequence[int]) -> PendingTokens:
        return KnownTokens(self.sample(logits.cpu(), rows))

    def sample(self, logits: Tensor, rows: Sequence[int]) -> list[SampledToken]:
        """The next tokens of `rows` of the table from their logits (rows, vocab) float32, which are changed."""
        table = self._table
        params = table.params_of(rows)
        reported = [i for i, row_params in enumerate(params) if row_params.logprobs is not None]
        raw = None
        if reported:  # a copy, unless nothing changes the logits
            keeps_logits = not self._states_in_use and len(reported) == len(rows)
            raw = logits if keeps_logits else logits[reported]
        for processor in self._processors_in_use:
            users = processor.rows
            for index, row in enumerate(rows):
                if row in users:
                    self._contain(row, processor.apply, logits[index], row, table)
        errors = self._grammars.apply(logits, rows)
        tokens = self._choose(logits, rows, params)
        corrupted = [i for i, token in enumerate(tokens) if token == NO_TOKEN]
        tokens = [max(token, 0) for token in tokens] if corrupted else tokens
        logprobs = {} if raw is None else self._report(raw, rows, params, reported, tokens)
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            table.append(row, token)
            for state in self._states_in_use:
                if row in state.rows and i not in corrupted:
                    self._contain(row, state.observe, row, token)
        self._grammars.start_masks()
        for i, row in enumerate(rows) if self._errors else ():
            if row in self._errors:
                errors[i] = self._errors[row]
        errors |= dict.fromkeys(corrupted, NOT_FINITE)
        return [SampledToken(token, logprobs.get(i), errors.get(i)) for i, token in enumerate(tokens)]

    @override
    def verify(self, logits: Tensor, rows: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[list[SampledToken]]:
        return verify_in_rounds(self.start, logits.cpu(), rows, drafts)

    @override
    def sample_following(
        self, rows: Sequence[int], steps: int, run: Callable[[TokenChoices], list[list[int]] | None]
    ) -> list[list[SampledToken]] | None:
        choices = self._choices(rows, steps)
        tokens = None if choices is None else run(choices)
        if tokens is None:
            return None
        for row, row_tokens in zip(rows, tokens, strict=True):
            for token in row_tokens:
                self._table.append(row, max(token, 0))
        return [[_sampled(token) for token in row_tokens] for row_tokens in tokens]

    @override
    def close(self) -> None:
        self._grammars.close()

    def _choices(self, rows: Sequence[int], steps: int) -> TokenChoices | None:
        """Return how a kernel chooses the tokens of rows as this sampler does; None if none can."""
        params = self._table.params_of(rows)
        follows = any(row in state.rows for state in self._states_in_use for row in rows)
        if follows or self._errors or any(map(_needs_sampler, params)):
            return None
        ends = {token for row_params in params for token in (*row_params.eos_token_ids, *row_params.stop_token_ids)}
        return TokenChoices(
            temperatures=[row_params.temperature for row_params in params],
            min_ps=[row_params.min_p for row_params in params],
            top_ks=[row_params.top_k for row_params in params],
            top_ps=[row_params.top_p for row_params in params],
            randoms=[random for step in range(steps) for random in self._randoms(rows, params, step)],
            ends=[*ends],
            steps=steps,
        )

    def _randoms(self, rows: Sequence[int], params: Sequence[SamplingParams], distance: int = 0) -> list[float]:
        """The random numbers for the next tokens of rows, or for those at a distance behind them."""
        lengths = [int(self._table.lengths[row]) - self._table[row].prompt_len for row in rows]
        return [
            uniform(row_params.seed or 0, length + distance) if row_params.temperature > 0 else 0.0
            for length, row_params in zip(lengths, params, strict=True)
        ]

    def _choose(self, logits: Tensor, rows: Sequence[int], params: Sequence[SamplingParams]) -> list[int]:
        randoms = self._randoms(rows, params)
        try:
            return sample_tokens(logits, params, randoms)
        except Exception:  # error boundary: find the sequence that fails
            logger.exception("batch sampling failed; retrying each row separately")
        tokens = [0] * len(rows)
        for i, row in enumerate(rows):
            alone = self._contain(row, sample_tokens, logits[i : i + 1], params[i : i + 1], randoms[i : i + 1])
            tokens[i] = alone[0] if alone else 0
        return tokens

    def _report(
        self,
        raw: Tensor,
        rows: Sequence[int],
        params: Sequence[SamplingParams],
        reported: Sequence[int],
        tokens: Sequence[int],
    ) -> dict[int, TokenLogprobs]:
        """Log-probabilities of the rows at indices `reported`, whose logits before all processors are `raw`."""
        most = max(params[i].logprobs or 0 for i in reported)
        listed = [params[i].logprob_token_ids for i in reported]
        try:
            reports = top_logprobs(raw, [tokens[i] for i in reported], most, listed)
        except Exception:  # error boundary: find the sequence that fails
            logger.exception("log-probabilities of a batch failed; retrying each row separately")
        else:
            return {i: _reported(entry, params[i]) for i, entry in zip(reported, reports, strict=True)}
        logprobs: dict[int, TokenLogprobs] = {}
        for at, i in enumerate(reported):
            count, listed_ids = params[i].logprobs or 0, listed[at : at + 1]
            alone = self._contain(rows[i], top_logprobs, raw[at : at + 1], [tokens[i]], count, listed_ids)
            if alone:
                logprobs[i] = alone[0]
        return logprobs

    def _contain(self, row: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a function; an exception fails the sequence in `row`."""
        try:
            return call(*args, **kwargs)
        except Exception as error:  # error boundary: only this sequence fails
            logger.exception("sampling for request %s failed", self._table[row].request_id)
            self._errors[row] = SequenceError(f"sampling failed: {type(error).__name__}: {error}")
            return None


def _needs_sampler(params: SamplingParams) -> bool:
    """Whether a row reports more than tokens, or has more tokens that end it than a kernel should search."""
    return params.logprobs is not None or len(params.eos_token_ids) + len(params.stop_token_ids) > _MOST_ENDS


def _sampled(token: int) -> SampledToken:
    return SampledToken(token, None) if token != NO_TOKEN else SampledToken(0, None, NOT_FINITE)


def sample_tokens(logits: Tensor, params: Sequence[SamplingParams], randoms: Sequence[float]) -> list[int]:
    """Sample a token from each row of logits (rows, vocab), `NO_TOKEN` if it has none. `randoms` are in [0, 1)."""
    if all(row_params.temperature == 0 for row_params in params):
        return argmax(logits)
    return sample(
        logits,
        [row_params.temperature for row_params in params],
        randoms,
        min_ps=[row_params.min_p for row_params in params],
        top_ks=[row_params.top_k for row_params in params],
        top_ps=[row_params.top_p for row_params in params],
    )


def verify_in_rounds(
    start: Callable[[Tensor, Sequence[int]], PendingTokens],
    logits: Tensor,
    rows: Sequence[int],
    drafts: Sequence[Sequence[int]],
) -> list[list[SampledToken]]:
    """`TokenSampler.verify` by calls of `TokenSampler.start`.

    A sequence whose draft is confirmed so far samples again from the draft's next token, so each token is sampled from
    the state after all tokens before it, as without a draft.
    """
    ends = itertools.accumulate(1 + len(draft) for draft in drafts)
    firsts = [end - 1 - len(draft) for draft, end in zip(drafts, ends, strict=True)]
    choices: list[list[SampledToken]] = [[] for _ in rows]
    active = list(range(len(rows)))
    for depth in itertools.count():
        if not active:
            break
        selected = logits if len(active) == len(logits) else logits[[firsts[i] + depth for i in active]]
        for i, choice in zip(active, start(selected, [rows[i] for i in active]).result(), strict=True):
            choices[i].append(choice)
        active = [i for i in active if _confirmed(drafts[i], depth, choices[i][-1])]
    return choices


def _confirmed(draft: Sequence[int], depth: int, choice: SampledToken) -> bool:
    return depth < len(draft) and draft[depth] == choice.token and choice.error is None


def _reported(entry: TokenLogprobs, params: SamplingParams) -> TokenLogprobs:
    """What a sequence reports of an entry that may have more top tokens than it asks for."""
    end = 1 + (len(params.logprob_token_ids) or params.logprobs or 0)
    return TokenLogprobs(entry.token_ids[:end], entry.logprobs[:end], entry.ranks[:end])
