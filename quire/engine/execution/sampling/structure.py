"""Structured outputs: only tokens that a grammar allows. Masks are computed while the model runs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from quire.engine.execution.table import RequestTable
from quire.engine.wire.grammar import GrammarTokens
from quire.engine.wire.protocol import SamplingParams

_MOST_GRAMMARS = 256  # kept compiled
_Key = tuple[str, tuple[int, ...]]
# What eight bits of a mask allow, as bounds of logits: torch applies these many times faster than a mask.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BOUNDS = np.where(_BITS == 1, np.inf, -np.inf).astype(np.float32)


class Grammars:
    """Compiled grammars, made off the engine's thread."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._tokens: dict[tuple[int, ...], GrammarTokens] = {}
        self._compiled: OrderedDict[_Key, Future[LLMatcher]] = OrderedDict()
        # One for what may take long, one for the masks that steps wait for.
        self._compiler = ThreadPoolExecutor(1, "quire-grammar")
        self._masks = ThreadPoolExecutor(1, "quire-mask")

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
        return None if compiled is None else Walk(compiled, self._vocab_size, self._masks)

    def _compile(self, grammar: str, ends: tuple[int, ...]) -> LLMatcher:
        if ends not in self._tokens:
            self._tokens[ends] = GrammarTokens(self._folder, self._vocab_size, ends)
        return self._tokens[ends].matcher(grammar)


class Walk:
    """Where one sequence stands in its grammar."""

    def __init__(self, compiled: Future[LLMatcher], vocab_size: int, workers: ThreadPoolExecutor) -> None:
        self._compiled = compiled
        self._vocab_size = vocab_size
        self._workers = workers
        self._matcher: LLMatcher | None = None
        self._bounds: Future[Tensor] | None = None

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on behind more tokens and begin to look what may follow."""
        self._bounds = self._workers.submit(self._look, tokens)

    @property
    def bounds(self) -> Tensor:
        """Of the next token's logits: (vocab,) float32, infinite if it may come, minus infinite if not.

        It waits for the look that was begun.
        """
        assert self._bounds is not None
        return self._bounds.result()

    @property
    def error(self) -> str | None:
        """Why there was no going on at the last look, if there was none."""
        assert self._matcher is not None
        return self._matcher.get_error() if self._matcher.is_error() else None

    def _look(self, tokens: Sequence[int]) -> Tensor:
        if self._matcher is None:
            self._matcher = self._compiled.result().deep_copy()
        if tokens:
            self._matcher.consume_tokens(list(tokens))
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            return torch.full((self._vocab_size,), torch.inf)
        bounds = _BOUNDS[allowed].reshape(-1)[: self._vocab_size]
        missing = self._vocab_size - len(bounds)
        return torch.from_numpy(np.pad(bounds, (0, missing), constant_values=-np.inf) if missing else bounds)


class Structure:
    """grammar: tokens that it does not allow are impossible, whatever other stages say."""

    def __init__(self, walk: Callable[[SamplingParams], Walk | None]) -> None:
        """`walk` begins the one of a request, if it has a grammar."""
        self._walk = walk
        self._walks: dict[int, Walk] = {}

    def add(self, row: int, params: SamplingParams, table: RequestTable) -> None:
        """See `Stage`."""
        walk = self._walk(params)
        if walk is not None:
            walk.advance(table.known_tokens(row)[table[row].prompt_len :].tolist())
            self._walks[row] = walk

    def remove(self, row: int) -> None:
        """See `Stage`."""
        self._walks.pop(row, None)

    def observe(self, row: int, token: int) -> None:
        """See `Stage`."""
        if (walk := self._walks.get(row)) is not None:
            walk.advance([token])

    def apply(self, logits: Tensor, rows: Sequence[int], table: RequestTable) -> None:
        """See `Stage`."""
        if self._walks:
            for index, row in enumerate(rows):
                if (walk := self._walks.get(row)) is not None:
                    _hold(logits[index], walk.bounds)

    def errors(self, rows: Sequence[int]) -> dict[int, str]:
        """Why sequences cannot go on, by index in `rows`, after their masks were applied."""
        walks = enumerate(map(self._walks.get, rows)) if self._walks else ()
        return {index: walk.error for index, walk in walks if walk is not None and walk.error is not None}


def _hold(logits: Tensor, bounds: Tensor) -> None:
    torch.minimum(logits, bounds, out=logits)
    if not logits.amax().item() > -torch.inf:  # nothing is left of what the grammar allows, or no number: it wins
        torch.clamp(bounds, max=0.0, out=logits)
