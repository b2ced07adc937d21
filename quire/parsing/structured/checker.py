"""Checks the grammars of requests by compiling them in worker processes.

The engine compiles a grammar again, since a compiled one cannot be moved between processes. It gets only grammars that
have compiled here within stricter limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quire.engine.client.grammar import GrammarError
from quire.engine.client.sized_cache import Key, SizedCache, key_of
from quire.parsing.structured import compilation
from quire.parsing.structured.compilation import CompilationResult
from quire.protocol.errors import InvalidRequest, Overloaded, Unavailable
from quire.workers.errors import Cause, JobKilled, JobTimedOut, QueueFull, WorkerError
from quire.workers.limits import WorkerLimits
from quire.workers.pool import WorkerPool
from quire.workers.threads import FairThreads

_MAX_LENGTH = 1 << 20  # characters of a grammar
_MAX_WAITING = 1024  # requests whose grammar is to be written
_CACHE = 16 << 20  # bytes of results
_RETRY_AFTER = {"Retry-After": "5"}  # seconds
_LIMITS = WorkerLimits(memory=256 << 20, seconds=5.0, stack=64 << 20)


@dataclass(frozen=True, slots=True)
class CheckedGrammar:
    """A grammar that the engine may compile.

    Attributes:
        text: the grammar in llguidance's format.
        size: bytes that it takes when it is compiled.
    """

    text: str
    size: int


class GrammarChecker:
    """Check grammars for one model. Results are cached by a hash of the grammar."""

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        share: float = 1.0,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Prepare to check grammars.

        Args:
            folder: the model's directory.
            vocab_size: its number of token ids.
            eos_token_ids: those that end an answer.
            share: the largest part of the queues for one tenant.
            waiting: gives a context for the time in which a request waits for its grammar.
        """
        self._waiting = waiting
        self._pool = WorkerPool(
            "grammar", f"{compilation.__name__}:worker", (folder, vocab_size, eos_token_ids), _LIMITS, share=share
        )
        self._writers = FairThreads("write-grammar", max_queued=_MAX_WAITING, share=share)
        self._special: dict[str, int] | None = None
        self._loading = asyncio.Lock()
        self._unsupported: str | None = None  # why the model has no grammars
        self._results: SizedCache[CompilationResult | str] = SizedCache(_CACHE)  # a string is an error message
        self._checking: dict[Key, _Shared] = {}

    def start(self) -> None:
        """Start the worker processes in the background."""
        self._pool.start()

    async def check(self, write: Callable[[Mapping[str, int]], str], param: str, *, tenant: str = "") -> CheckedGrammar:
        """Write a grammar and check that it compiles.

        Args:
            write: makes the grammar, given the ids of special tokens by their texts. It runs in a thread.
            param: the request field that the grammar comes from.
            tenant: the tenant that sent the grammar; where grammars wait, tenants take turns.

        Returns:
            The grammar as the engine compiles it, and its size.

        Raises:
            InvalidRequest: the grammar is not valid, or too expensive.
            Overloaded: too many grammars wait to be checked.
            Unavailable: the worker processes cannot be used.
        """
        try:
            with self._waiting():
                special = await self._special_tokens()
                grammar = await self._writers.run(partial(write, special), tenant=tenant)
                result = await self._result(grammar, tenant)
        except GrammarError as error:
            result = str(error)
        except QueueFull as error:
            raise Overloaded(f"Too many grammars are being compiled: {error}.", headers=_RETRY_AFTER) from error
        except JobTimedOut as error:
            raise Overloaded("The server is too busy to compile the grammar.", headers=_RETRY_AFTER) from error
        except WorkerError as error:
            raise Unavailable(f"Grammars cannot be compiled: {error}.") from error
        if isinstance(result, str):
            raise InvalidRequest(
                f"The constraint of the structured output is invalid, not supported or too large: {result}", param
            )
        return CheckedGrammar(grammar if result.text is None else result.text, result.size)

    async def close(self) -> None:
        """End the worker processes; grammars that have not been checked are dropped."""
        self._writers.close()
        await self._pool.close()

    async def _special_tokens(self) -> Mapping[str, int]:
        if self._unsupported is not None:
            raise GrammarError(self._unsupported)
        if self._special is not None:
            return self._special
        async with self._loading:  # the first requests wait for one job
            if self._special is None:
                try:
                    self._special = await self._pool.run(None)
                except GrammarError as error:
                    self._unsupported = str(error)
                    raise
            return self._special

    async def _result(self, grammar: str, tenant: str) -> CompilationResult | str:
        """The result of a check that was made earlier, is being made, or is made now."""
        if len(grammar) > _MAX_LENGTH:
            return f"it has {len(grammar)} characters; at most {_MAX_LENGTH} are allowed"
        key = key_of(grammar)
        known = self._results.get(key)
        if known is not None:
            return known
        shared = self._checking.get(key)
        if shared is None:
            shared = self._checking[key] = _Shared(asyncio.create_task(self._check(key, grammar, tenant)))
        shared.waiting += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.waiting -= 1
            if not shared.waiting:
                self._checking.pop(key, None)
                shared.task.cancel()

    async def _check(self, key: Key, grammar: str, tenant: str) -> CompilationResult | str:
        result: CompilationResult | str
        try:
            result = await self._pool.run(grammar, tenant=tenant)
        except GrammarError as error:
            result = str(error)
        except JobTimedOut as error:
            if error.stalled:
                raise
            result = f"{error} to compile"
        except JobKilled as error:
            if error.cause in (Cause.CRASH, Cause.KILLED):
                raise
            result = str(error)
        text = result if isinstance(result, str) else result.text or ""
        self._results.put(key, result, len(text.encode()))
        return result


@dataclass(slots=True)
class _Shared:
    """A check, and the number of requests that wait for it."""

    task: asyncio.Task[CompilationResult | str]
    waiting: int = 0
