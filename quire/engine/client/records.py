"""Records of engine events, for metrics and logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from quire.engine.client.protocol import FinishReason, MemoryTag, SleepLevel, StepStats


@dataclass(slots=True)
class RequestTimes:
    """Monotonic seconds of a request's events; 0 for an event that did not happen."""

    arrived: float
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


@dataclass(slots=True)
class SequenceGroup:
    """The sequences of a request with one prompt, which some metrics count once.

    Attributes:
        size: the number of sequences; 0 if they are not counted.
        running: the number of sequences that have not ended.
        longest: tokens of the longest one that has ended.
    """

    size: int = 1
    running: int = 1
    longest: int = 0

    def end(self, tokens: int) -> bool:
        """A sequence has ended with this number of tokens. Returns whether it was the last one."""
        self.running -= 1
        self.longest = max(self.longest, tokens)
        return self.running == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One finished sequence. The last five attributes are 0 for pooling.

    Attributes:
        answers: sequences of the request with this prompt, in the last of them to end; 0 in the others.
        longest_answer: tokens of the longest of them; 0 where `answers` is.
    """

    kind: Literal["generate", "pool"]
    times: RequestTimes
    finished: float
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int = 0
    max_tokens: int = 0
    answers: int = 0
    longest_answer: int = 0
    preemptions: int = 0


class Observer(Protocol):
    """Receives the events of one engine, on the event loop; must not block."""

    def on_step(self, stats: StepStats) -> None:
        """The engine finished a step."""

    def on_tokens(self, times: RequestTimes, now: float, count: int) -> None:
        """A sequence got `count` tokens at `now`; `times` still holds the time of its previous token."""

    def on_finish(self, record: RequestRecord) -> None:
        """A request finished."""

    def on_audio(self, seconds: float) -> None:
        """So many seconds of audio were transcribed."""

    def on_restart(self) -> None:
        """The engine died and has been started again."""

    def on_overload(self) -> None:
        """A request was refused because too many sequences run or wait."""

    def on_sleep(self, asleep: frozenset[MemoryTag], level: SleepLevel) -> None:
        """The engine has fallen asleep or woken up; `asleep`: what has no memory; `level`: of the last sleep."""


class NullObserver:
    """Ignores all events."""

    def on_step(self, stats: StepStats) -> None:
        """Ignore the event."""

    def on_tokens(self, times: RequestTimes, now: float, count: int) -> None:
        """Ignore the event."""

    def on_finish(self, record: RequestRecord) -> None:
        """Ignore the event."""

    def on_audio(self, seconds: float) -> None:
        """Ignore the event."""

    def on_restart(self) -> None:
        """Ignore the event."""

    def on_overload(self) -> None:
        """Ignore the event."""

    def on_sleep(self, asleep: frozenset[MemoryTag], level: SleepLevel) -> None:
        """Ignore the event."""
