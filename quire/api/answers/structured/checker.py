"""Makes the grammars of requests and sees whether they can be used, off the event loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire.api.http.errors import InvalidRequest
from quire.engine.wire.grammar import GrammarError, GrammarTokens

_MOST_KNOWN = 1024
_LONGEST = 1 << 20  # characters of a grammar
_TIMEOUT = 10.0  # seconds; the grammar library's own limits are met long before


class GrammarChecker:
    """Makes grammars for one model; each is compiled once to see whether that goes."""

    def __init__(self, folder: Path, vocab_size: int, ends: tuple[int, ...]) -> None:
        """`ends`: the model's end-of-sequence tokens."""
        self._given = (folder, vocab_size, ends)
        self._tokens: GrammarTokens | None = None
        self._verdicts: OrderedDict[str, str | None] = OrderedDict()
        self._workers = ThreadPoolExecutor(2, "quire-check-grammar")

    async def make(self, write: Callable[[Mapping[str, int]], str], param: str) -> str:
        """The grammar that `write` makes, given the special tokens, if it can be used.

        Raises:
            InvalidRequest: it cannot; `param` is to blame.
        """
        work = asyncio.get_running_loop().run_in_executor(self._workers, self._make, write)
        try:
            grammar, problem = await asyncio.wait_for(work, _TIMEOUT)
        except TimeoutError:
            grammar, problem = "", f"compiling takes longer than {_TIMEOUT:.0f} s"
        except GrammarError as error:
            grammar, problem = "", str(error)
        if problem is not None:
            raise InvalidRequest(f"The structured output cannot be had: {problem}", param)
        return grammar

    def _make(self, write: Callable[[Mapping[str, int]], str]) -> tuple[str, str | None]:
        tokens = self._tokens = self._tokens or GrammarTokens(*self._given)
        grammar = write(tokens.special)
        if grammar not in self._verdicts:
            self._verdicts[grammar] = _verdict(tokens, grammar)
            if len(self._verdicts) > _MOST_KNOWN:
                self._verdicts.popitem(last=False)
        return grammar, self._verdicts.get(grammar)


def _verdict(tokens: GrammarTokens, grammar: str) -> str | None:
    if len(grammar) > _LONGEST:
        return f"its grammar has {len(grammar)} characters, more than {_LONGEST}"
    try:
        tokens.matcher(grammar)
    except GrammarError as error:
        return str(error)
    return None
