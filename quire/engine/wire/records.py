"""Plain records of what happened, for whoever keeps the books (metrics, logs)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quire.engine.wire.protocol import FinishReason, StepStats


@dataclass(slots=True)
class RequestTimes:
    """Monotonic seconds at which a sequence passed its stations; 0 where it never came."""

    arrived: float
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished sequence."""

    times: RequestTimes
    finished: float
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int


class Observer(Protocol):
    """Told of everything that an engine does, on the event loop; must be quick."""

    def on_step(self, stats: StepStats) -> None:
        """The engine made a step."""

    def on_tokens(self, times: RequestTimes, now: float, count: int) -> None:
        """A sequence got `count` tokens; `times` still holds the moment of its tokens before."""

    def on_finish(self, record: RequestRecord) -> None:
        """A sequence ended."""


class NullObserver:
    """Keeps no books."""

    def on_step(self, stats: StepStats) -> None:
        """Ignore it."""

    def on_tokens(self, times: RequestTimes, now: float, count: int) -> None:
        """Ignore it."""

    def on_finish(self, record: RequestRecord) -> None:
        """Ignore it."""
