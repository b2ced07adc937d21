"""Records of engine events, and the observers that get them: metrics, and whatever else is to watch an engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from quire.engine.client.origin import Origin, current_origin
from quire.engine.client.protocol import FinishReason, MemoryTag, SleepLevel, StepStats
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.timeline import RequestTimes

logger = logging.getLogger(__name__)
Rejection = Literal["max_num_queued_reqs", "max_client_share"]  # limits; the first is vLLM's name of ours
SleepOperation = Literal["sleep", "wake"]
ToolRequest = Literal["chat_completions", "responses", "other"]  # the API of a request with tools


@dataclass(slots=True)
class SequenceGroup:
    """The sequences of a request with one prompt, which some metrics count once.

    Attributes:
        size: the number of sequences; 0 if they are not counted.
        running: the number of sequences that have not ended.
        longest: tokens of the longest one that has ended.
        least_cached: the fewest cached tokens of those that have ended; None before the first.
    """

    size: int = 1
    running: int = 1
    longest: int = 0
    least_cached: int | None = None

    def end(self, tokens: int, cached: int) -> bool:
        """Note that a sequence has ended, with its numbers of tokens. Returns whether it was the last one."""
        self.running -= 1
        self.longest = max(self.longest, tokens)
        self.least_cached = cached if self.least_cached is None else min(self.least_cached, cached)
        return self.running == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One finished sequence. The numbers from `output_tokens` on are 0 for pooling.

    Attributes:
        request_id: its id in the engine.
        origin: the HTTP request that it is part of.
        answers: sequences of the request with this prompt, in the last of them to end; 0 in the others.
        longest_answer: tokens of the longest of them; 0 where `answers` is.
        is_search_step: it is one token of one beam of a beam search, which has thousands of such sequences.
        params: those of a sequence that generates.
        error: the class of the error that ended it; empty without one.
        least_cached: of the cached tokens of `answers` sequences, the fewest; 0 where `answers` is.
        prefill_chunks: steps that have computed tokens of the prompt; 0 if it got no token.
        draft_tokens, accepted_tokens: of speculative decoding.
        loaded_tokens: part of `cached_tokens` that was read from a second tier; also of pooling.
    """

    request_id: str
    origin: Origin
    kind: Literal["generate", "pool"]
    times: RequestTimes
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int = 0
    max_tokens: int = 0
    answers: int = 0
    longest_answer: int = 0
    preemptions: int = 0
    is_search_step: bool = False
    params: SamplingParams | None = None
    error: str = ""
    least_cached: int = 0
    prefill_chunks: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    loaded_tokens: int = 0

    def add_to_timeline(self) -> None:
        """Add the sequence to the timeline of its HTTP request."""
        timeline = self.origin.timeline
        timeline.add_times(self.times)
        if not self.is_search_step:  # each has the prompt and the beam so far
            timeline.add_tokens(self.prompt_tokens, self.cached_tokens, self.output_tokens)


class Observer:
    """Receive the events of one engine, on the event loop; must not block. A class has the methods that it needs."""

    def on_step(self, stats: StepStats) -> None:
        """The engine finished a step."""

    def on_tokens(self, origin: Origin, times: RequestTimes, now: float, count: int) -> None:
        """A sequence got `count` tokens at `now`; `times` still holds the time of its previous token."""

    def on_finish(self, record: RequestRecord) -> None:
        """A request finished."""

    def on_audio(self, seconds: float) -> None:
        """So many seconds of audio were transcribed."""

    def on_media_lookup(self, found: bool) -> None:
        """A picture or video was looked up in the cache of prepared ones, or among those that are being prepared."""

    def on_preprocessing_start(self) -> None:
        """A request waits until its media are read and prepared."""

    def on_preprocessing_end(self, seconds: float) -> None:
        """It does so no longer; it has waited for so long."""

    def on_grammar_start(self) -> None:
        """A request waits until its grammar is checked."""

    def on_grammar_end(self, seconds: float) -> None:
        """It does so no longer; it has waited for so long."""

    def on_tool_parse(self, api: ToolRequest, streams: bool, called: bool) -> None:
        """Text of an answer was searched for tool calls: the whole answer, or a piece if it streams."""

    def on_restart(self) -> None:
        """The engine died and has been started again."""

    def on_overload(self, reason: Rejection) -> None:
        """A request was refused because too many sequences run or wait: of all clients, or of its own."""

    def on_sleep(self, asleep: frozenset[MemoryTag], level: SleepLevel) -> None:
        """The engine has fallen asleep or woken up; `asleep`: what has no memory; `level`: of the last sleep."""

    def on_sleep_operation_start(self, operation: SleepOperation) -> None:
        """The engine is being put to sleep or woken up."""

    def on_sleep_operation_end(self, operation: SleepOperation, seconds: float) -> None:
        """That is done, or has failed; it has taken so long."""


CORE_EVENTS = frozenset(("on_step", "on_tokens", "on_finish", "on_restart", "on_sleep"))  # of the engine's core


class Observers(Observer):
    """All observers of an engine. One that fails neither keeps events from the others nor fails requests."""

    def __init__(self) -> None:
        self._listeners: dict[str, list[Callable[..., None]]] = {
            name: [] for name in vars(Observer) if name.startswith("on_")
        }
        self._on_tokens = self._listeners["on_tokens"]

    def add(self, observer: Observer, *, without: Collection[str] = ()) -> None:
        """Tell an observer all events from now on for which its class has a method. `without`: methods to leave out."""
        for name, listeners in self._listeners.items():
            if name not in without and getattr(type(observer), name) is not getattr(Observer, name):
                listeners.append(getattr(observer, name))

    @override
    def on_step(self, stats: StepStats) -> None:
        self._tell("on_step", stats)

    @override
    def on_tokens(self, origin: Origin, times: RequestTimes, now: float, count: int) -> None:
        for listener in self._on_tokens:  # as `_tell`, for each sequence in each step
            try:
                listener(origin, times, now, count)
            except Exception:
                logger.exception("an observer of the engine failed")

    @override
    def on_finish(self, record: RequestRecord) -> None:
        self._tell("on_finish", record)

    @override
    def on_audio(self, seconds: float) -> None:
        self._tell("on_audio", seconds)

    @override
    def on_media_lookup(self, found: bool) -> None:
        self._tell("on_media_lookup", found)

    @contextmanager
    def preprocessing(self) -> Iterator[None]:
        """A context in which a request waits for its media."""
        begun = time.monotonic()
        self._tell("on_preprocessing_start")
        try:
            with current_origin().timeline.media:
                yield
        finally:
            current_origin().notes.add("media", begun)
            self._tell("on_preprocessing_end", time.monotonic() - begun)

    @contextmanager
    def checking_grammar(self) -> Iterator[None]:
        """A context in which a request waits for its grammar."""
        begun = time.monotonic()
        self._tell("on_grammar_start")
        try:
            yield
        finally:
            self._tell("on_grammar_end", time.monotonic() - begun)

    @override
    def on_tool_parse(self, api: ToolRequest, streams: bool, called: bool) -> None:
        self._tell("on_tool_parse", api, streams, called)

    @override
    def on_restart(self) -> None:
        self._tell("on_restart")

    @override
    def on_overload(self, reason: Rejection) -> None:
        self._tell("on_overload", reason)

    @override
    def on_sleep(self, asleep: frozenset[MemoryTag], level: SleepLevel) -> None:
        self._tell("on_sleep", asleep, level)

    @contextmanager
    def sleep_operation(self, operation: SleepOperation) -> Iterator[None]:
        """A context in which the engine is put to sleep or woken up."""
        begun = time.monotonic()
        self._tell("on_sleep_operation_start", operation)
        try:
            yield
        finally:
            self._tell("on_sleep_operation_end", operation, time.monotonic() - begun)

    def _tell(self, event: str, *arguments: object) -> None:
        for listener in self._listeners[event]:
            try:
                listener(*arguments)
            except Exception:  # of code that only watches: requests go on
                logger.exception("an observer of the engine failed")
