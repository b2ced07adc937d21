"""Structured outputs: only tokens that a grammar allows. Masks are computed while the model runs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from quire.engine.execution.table import RequestTable
from quire.engine.wire.grammar import GrammarTokens
from quire.engine.wire.protocol import SamplingParams
from quire.kernels.sampling import Masks, apply_token_bitmask, mask_words

_MOST_GRAMMARS = 256  # kept compiled
_Key = tuple[str, tuple[int, ...]]
_EVERY = 0xFFFFFFFF  # a word of a mask that forbids nothing


class Grammars:
    """Compiled grammars, made off the engine's thread."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._tokens: dict[tuple[int, ...], GrammarTokens] = {}
        self._compiled: OrderedDict[_Key, Future[LLMatcher]] = OrderedDict()
        self._compiler = ThreadPoolExecutor(1, "quire-grammar")

    def prepare(self, params: SamplingParams) -> Future[LLMatcher] | None:
        """Compiles the grammar of a request; none if it has none. It raises GrammarError when it fails."""
        if not params.grammar:
            return None
        key = (params.grammar, params.eos_token_ids)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._compiler.submit(self._compile, *key)
            while len(self._compiled) > _MOST_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return compiled

    def walk(self, params: SamplingParams) -> Walk | None:
        """A walk along the grammar of a request, whose grammar was prepared; none if it has none."""
        compiled = self.prepare(params)
        return None if compiled is None else Walk(compiled)

    def _compile(self, grammar: str, ends: tuple[int, ...]) -> LLMatcher:
        if ends not in self._tokens:
            self._tokens[ends] = GrammarTokens(self._folder, self._vocab_size, ends)
        return self._tokens[ends].matcher(grammar)


class Walk:
    """Where one sequence stands in its grammar."""

    def __init__(self, compiled: Future[LLMatcher]) -> None:
        self._compiled = compiled
        self._matcher: LLMatcher | None = None

    def advance(self, tokens: Sequence[int], mask: NDArray[np.uint32]) -> None:
        """Go on behind more tokens, and write which may follow into their mask."""
        if self._matcher is None:
            self._matcher = self._compiled.result().deep_copy()
        if tokens:
            self._matcher.consume_tokens(list(tokens))
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            mask[:] = _EVERY

    @property
    def error(self) -> str | None:
        """Why there is no going on, if there is none."""
        assert self._matcher is not None
        return self._matcher.get_error() if self._matcher.is_error() else None


class Structure:
    """grammar: tokens that it does not allow are impossible, whatever other stages say."""

    def __init__(self, walk: Callable[[SamplingParams], Walk | None], vocab_size: int) -> None:
        """`walk` begins the one of a request, if it has a grammar."""
        self._walk = walk
        self._walks: dict[int, Walk] = {}
        self._masks: Masks = np.empty((0, mask_words(vocab_size)), np.uint32)  # by row
        self._worker = ThreadPoolExecutor(1, "quire-mask")
        self._behind: list[tuple[int, Sequence[int]]] = []  # rows with tokens that their walks have not seen
        self._looking: Future[None] | None = None

    def add(self, row: int, params: SamplingParams, table: RequestTable) -> None:
        """See `Stage`."""
        walk = self._walk(params)
        if walk is not None:
            if row >= len(self._masks):
                self._wait()
                self._masks = np.resize(self._masks, (2 * row + 1, self._masks.shape[1]))
            self._walks[row] = walk
            self._behind.append((row, table.known_tokens(row)[table[row].prompt_len :].tolist()))

    def remove(self, row: int) -> None:
        """See `Stage`."""
        self._walks.pop(row, None)

    def observe(self, row: int, token: int) -> None:
        """See `Stage`."""
        if row in self._walks:
            self._behind.append((row, [token]))

    def look_ahead(self) -> None:
        """Begin to find out what may follow the tokens that came since the last time, on a thread of its own."""
        if self._behind:
            steps = [(self._walks[row], tokens, self._masks[row]) for row, tokens in self._behind]
            self._behind = []
            self._looking = self._worker.submit(_advance, steps, self._looking)

    def apply(self, logits: Tensor, rows: Sequence[int], table: RequestTable) -> None:
        """See `Stage`."""
        pairs = [(index, row) for index, row in enumerate(rows) if row in self._walks]
        if pairs:
            self._wait()
            apply_token_bitmask(logits, self._masks, pairs)

    def errors(self, rows: Sequence[int]) -> dict[int, str]:
        """Why sequences cannot go on, by index in `rows`, after their masks were applied."""
        walks = enumerate(map(self._walks.get, rows)) if self._walks else ()
        return {index: walk.error for index, walk in walks if walk is not None and walk.error is not None}

    def _wait(self) -> None:
        if self._looking is not None:
            self._looking.result()


def _advance(steps: Sequence[tuple[Walk, Sequence[int], NDArray[np.uint32]]], before: Future[None] | None) -> None:
    if before is not None:
        before.result()  # one that failed is not forgotten
    for walk, tokens, mask in steps:
        walk.advance(tokens, mask)
