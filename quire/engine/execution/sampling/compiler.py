"""Compiles the grammars of requests, each in a separate thread, and caches compiled grammars within a memory limit."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from llguidance import LLMatcher

from quire.engine.client.grammar import GrammarError, GrammarTokens
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.sized_cache import Key, key_of
from quire.engine.execution.sampling.grammar import GrammarState, GrammarUsage
from quire.engine.execution.sampling.thread_stacks import start_thread

_CAPACITY = 1 << 30  # bytes of compiled grammars that requests need
_IDLE_CAPACITY = 128 << 20  # bytes of grammars that no request needs
_MAX_THREADS = 2
_OVERDUE = 30.0  # seconds; the front end refuses grammars that take a sixth of this
_JOIN = 1.0  # seconds
_GROWTH = 8 << 10  # bytes that a token adds to the lexer's states at most, as measured
_MAX_GROWTH = 32 << 20
_UNKNOWN_SIZE = 4 << 20  # bytes of a grammar whose size the front end has not measured


@dataclass(slots=True, eq=False)
class _Entry:
    """A grammar that is compiled, or will be.

    Attributes:
        size: bytes when it is compiled.
        users: ids of the requests that need it.
        started: seconds at which its thread was started; None before.
        usage: tokens and time used by all requests so far.
    """

    params: SamplingParams
    size: int
    compiled: Future[LLMatcher] = field(default_factory=Future)
    users: set[str] = field(default_factory=set)
    started: float | None = None
    usage: GrammarUsage = field(default_factory=GrammarUsage)

    @property
    def idle_size(self) -> int:
        """Bytes, by estimate, after it has been used. All sequences extend one table of lexer states."""
        return self.size + min(_GROWTH * self.usage.tokens, _MAX_GROWTH)

    @property
    def worth_keeping(self) -> bool:
        """Whether it is of use to later requests."""
        failed = self.compiled.done() and self.compiled.exception() is not None
        return not self.waits and not failed and not self.usage.failed

    @property
    def waits(self) -> bool:
        """Whether it has no thread yet."""
        return self.started is None and not self.compiled.done()

    @property
    def runs(self) -> bool:
        """Whether a thread compiles it."""
        return self.started is not None and not self.compiled.done()


class GrammarCompiler:
    """Used by the engine's thread only. Grammars of running requests are kept, others within a memory limit."""

    def __init__(
        self, folder: Path, vocab_size: int, capacity: int = _CAPACITY, idle_capacity: int = _IDLE_CAPACITY
    ) -> None:
        """Start nothing yet.

        Args:
            folder: the model's directory.
            vocab_size: number of columns of the model's logits.
            capacity: bytes of compiled grammars that requests need; beyond it requests wait for others to end.
            idle_capacity: bytes of compiled grammars that are kept for later requests.
        """
        self._folder = folder
        self._vocab_size = vocab_size
        self._capacity = capacity
        self._idle_capacity = idle_capacity
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()  # least recently used first
        self._needed: dict[str, Key] = {}  # by request id
        self._tokens: dict[tuple[int, ...], GrammarTokens] = {}
        self._loading = threading.Lock()
        self._threads: list[threading.Thread] = []

    def prepare(self, request_id: str, params: SamplingParams) -> Future[LLMatcher]:
        """Compile the grammar of a request, at once or when there is room; `release` ends the request's need for it.

        The future may raise `GrammarError`.
        """
        key = _key(params)
        entry = self._entries.get(key)
        if entry is None:
            size = params.grammar_size or _UNKNOWN_SIZE + len(params.grammar)
            entry = self._entries[key] = _Entry(params, size)
        self._entries.move_to_end(key)
        entry.users.add(request_id)
        self._needed[request_id] = key
        self.advance()
        return entry.compiled

    def release(self, request_id: str) -> None:
        """A request has ended. Requests without a grammar are ignored."""
        key = self._needed.pop(request_id, None)
        if key is not None:
            entry = self._entries[key]
            entry.users.discard(request_id)
            if not entry.users and not entry.worth_keeping:
                del self._entries[key]
            self._evict()
            self.advance()

    def advance(self) -> None:
        """Start to compile grammars that fit into the memory limit now, and give up grammars that take too long."""
        running = 0
        for entry in [entry for entry in self._entries.values() if entry.runs]:
            assert entry.started is not None
            if time.monotonic() - entry.started > _OVERDUE:
                with suppress(InvalidStateError):
                    entry.compiled.set_exception(GrammarError(f"compiling it took more than {_OVERDUE:.0f} s"))
            else:
                running += 1
        for entry in [entry for entry in self._entries.values() if entry.waits]:
            if running >= _MAX_THREADS:
                return
            if self._has_room(entry.size):
                entry.started = time.monotonic()
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                self._threads.append(start_thread(partial(self._compile, entry), "quire-grammar"))
                running += 1

    def initial_state(self, params: SamplingParams) -> GrammarState | None:
        """The state before the first token of a request whose grammar is ready; None if it has no grammar."""
        if not params.grammar:
            return None
        entry = self._entries[_key(params)]
        return GrammarState(entry.compiled, entry.usage)

    def close(self) -> None:
        """Wait a moment for the threads; one that is stuck ends with the process."""
        for thread in self._threads:
            thread.join(_JOIN)

    def _has_room(self, size: int) -> bool:
        """Whether a grammar may be compiled now. A single grammar of any size may."""
        used = sum(entry.size for entry in self._entries.values() if entry.users and not entry.waits)
        return used == 0 or used + size <= self._capacity

    def _evict(self) -> None:
        """Drop grammars that no request needs, except those used last."""
        idle = [(key, entry) for key, entry in self._entries.items() if not entry.users and not entry.runs]
        size = sum(entry.idle_size for _, entry in idle)
        for key, entry in idle:
            if size <= self._idle_capacity:
                break
            del self._entries[key]
            size -= entry.idle_size

    def _compile(self, entry: _Entry) -> None:
        try:
            matcher = self._tokens_for(entry.params.eos_token_ids).matcher(entry.params.grammar)
        except BaseException as error:  # noqa: BLE001 thread edge: the request fails
            with suppress(InvalidStateError):
                entry.compiled.set_exception(error)
        else:
            with suppress(InvalidStateError):
                entry.compiled.set_result(matcher)

    def _tokens_for(self, end_tokens: tuple[int, ...]) -> GrammarTokens:
        with self._loading:
            if end_tokens not in self._tokens:
                self._tokens[end_tokens] = GrammarTokens(self._folder, self._vocab_size, end_tokens)
            return self._tokens[end_tokens]


def _key(params: SamplingParams) -> Key:
    return key_of(params.grammar, repr(params.eos_token_ids))
