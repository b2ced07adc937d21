"""Structured outputs: tokens that a grammar does not allow get -inf. Masks are computed while the model runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from quire.engine.client.grammar import problem_of
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.sampling.thread_stacks import executor
from quire.engine.scheduling.plan import SequenceError
from quire.kernels.sampling import Masks, apply_token_bitmask, mask_words

logger = logging.getLogger(__name__)
_ALLOW_ALL = 0xFFFFFFFF  # a word of a mask
# Processor time of masks, in seconds. The library's limits bound the states that a token creates, but not those that
# it visits.
_PER_STEP = 0.05  # of all sequences; each has an equal share within these bounds:
_PER_TOKEN, _LEAST_PER_TOKEN = 0.01, 0.002
_AT_ONCE = 0.25  # that the sequences of a grammar may use beyond it; later tokens regain it


@dataclass(slots=True)
class GrammarUsage:
    """Usage of a grammar by all of its sequences, which extend one table of lexer states.

    Attributes:
        tokens: number of tokens that were matched.
        failed: whether a sequence could not continue, for example since the table is full.
        seconds: time that the next masks may take.
    """

    tokens: int = 0
    failed: bool = False
    seconds: float = _AT_ONCE

    def spend(self, seconds: float, allowed: float) -> None:
        """Count the time of a mask, for which some was allowed."""
        self.seconds = min(_AT_ONCE, self.seconds + allowed - seconds)


class GrammarState:
    """The parser state of one sequence."""

    def __init__(self, compiled: Future[LLMatcher], usage: GrammarUsage | None = None) -> None:
        """`compiled`: the grammar, which has been compiled; `usage`: counts the time that this sequence spends."""
        self._compiled = compiled
        self._usage = usage or GrammarUsage()
        self._matcher: LLMatcher | None = None
        self.error: SequenceError | None = None  # why the sequence cannot continue

    def advance(self, tokens: Sequence[int], mask: NDArray[np.uint32], allowed: float = _PER_TOKEN) -> None:
        """Consume tokens and write the mask of the tokens that may follow. After an error the mask allows all.

        Args:
            tokens: tokens that follow those consumed so far.
            mask: mask of the row.
            allowed: seconds of processor time for each token.
        """
        if self.error is not None:
            return
        if self._usage.seconds >= 0:
            started = time.thread_time()
            try:
                self._advance(tokens, mask)
            except Exception as error:  # error boundary: other masks follow on the same thread
                logger.exception("a grammar's mask could not be computed")
                self.error = SequenceError(f"the grammar failed: {type(error).__name__}: {error}")
            self._usage.spend(time.thread_time() - started, allowed * max(1, len(tokens)))
            self._usage.tokens += len(tokens)
        if self._usage.seconds < 0 and self.error is None:
            message = f"the grammar is too expensive: it takes more than {1000 * allowed:.0f} ms for each token"
            self.error = SequenceError(message, invalid=True)
        if self.error is not None:
            self._usage.failed = True
            mask[:] = _ALLOW_ALL

    def _advance(self, tokens: Sequence[int], mask: NDArray[np.uint32]) -> None:
        if self._matcher is None:
            self._matcher = self._compiled.result().deep_copy()
        if tokens:
            self._matcher.consume_tokens(list(tokens))
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            self.error = SequenceError(f"the grammar is too expensive: {problem_of(self._matcher)}", invalid=True)


class GrammarProcessor:
    """Apply the masks of grammars after all logits processors, so that grammars take precedence."""

    def __init__(self, initial_state: Callable[[SamplingParams], GrammarState | None], vocab_size: int) -> None:
        """`initial_state`: see `Sampler`."""
        self._initial_state = initial_state
        self._states: dict[int, GrammarState] = {}
        self._masks: Masks = np.empty((0, mask_words(vocab_size)), np.uint32)  # by row
        self._thread = executor("quire-mask")
        self._unseen: list[tuple[int, Sequence[int]]] = []  # rows with tokens that their states have not consumed
        self._computing: Future[None] | None = None

    @property
    def rows(self) -> Collection[int]:
        """Rows of sequences that have a grammar."""
        return self._states

    def add(self, row: int, params: SamplingParams, table: RequestTable) -> None:
        """A sequence was put into a row; its known tokens are in the table."""
        state = self._initial_state(params)
        if state is not None:
            if row >= len(self._masks):
                self._wait()
                self._masks = np.resize(self._masks, (2 * row + 1, self._masks.shape[1]))
            self._states[row] = state
            self._unseen.append((row, table.known_tokens(row)[table[row].prompt_len :].tolist()))

    def remove(self, row: int) -> None:
        """A row was freed."""
        self._states.pop(row, None)

    def observe(self, row: int, token: int) -> None:
        """A token was sampled for a row that has a grammar."""
        self._unseen.append((row, [token]))

    def start_masks(self) -> None:
        """Start to compute, in another thread, the masks that follow the tokens observed since the last call."""
        if self._unseen:
            steps = [(self._states[row], tokens, self._masks[row]) for row, tokens in self._unseen]
            self._unseen = []
            self._computing = self._thread.submit(_advance, steps, self._computing)

    def masks_of(self, rows: Sequence[int]) -> Masks:
        """A copy of the masks of rows that have a grammar: (len(rows), words)."""
        self._wait()
        masks: Masks = self._masks[list(rows)]
        return masks

    def errors_of(self, rows: Sequence[int]) -> dict[int, SequenceError]:
        """The errors of those of `rows` that cannot continue, by row; known when their masks are."""
        return {row: error for row in rows if (error := self._states[row].error) is not None}

    def apply(self, logits: Tensor, rows: Sequence[int]) -> dict[int, SequenceError]:
        """Mask logits (rows, vocab) of `rows`; returns the errors of sequences that cannot continue, by index."""
        pairs = [(index, row) for index, row in enumerate(rows) if row in self._states] if self._states else []
        if not pairs:
            return {}
        self._wait()
        apply_token_bitmask(logits, self._masks, pairs)
        return {index: error for index, row in pairs if (error := self._states[row].error) is not None}

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _wait(self) -> None:
        if self._computing is not None:
            self._computing.result()


def _advance(
    steps: Sequence[tuple[GrammarState, Sequence[int], NDArray[np.uint32]]], before: Future[None] | None
) -> None:
    if before is not None:
        before.result()  # raises the earlier exception again
    allowed = max(_LEAST_PER_TOKEN, min(_PER_TOKEN, _PER_STEP / len(steps)))
    for state, tokens, mask in steps:
        state.advance(tokens, mask, allowed)
