"""What the requests of an API key use, and the limits of it: requests and tokens per minute, concurrent requests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol, Self

_MINUTE = 60.0
_BUSY_SECONDS = 1.0  # after which a client with too many concurrent requests may try again
Clock = Callable[[], float]
Limited = Literal["requests", "tokens", "concurrency"]
# OpenAI's headers about the limits per minute
LIMIT_HEADERS = tuple(
    f"x-ratelimit-{fact}-{unit}" for unit in ("requests", "tokens") for fact in ("limit", "remaining", "reset")
)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much the requests of a key may use; 0: no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_concurrent_requests: int = 0


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Excess:
    """Why a request is refused.

    Attributes:
        reason: what there is too much of.
        message: for the client.
        seconds: after which the request would be accepted, if nothing else is used until then.
    """

    reason: Limited
    message: str
    seconds: float


class Numbers(Protocol):
    """Numbers in a list, or in memory that processes share."""

    def __getitem__(self, index: int, /) -> float:
        """Return one of them."""

    def __setitem__(self, index: int, value: float, /) -> None:
        """Set one of them."""


class Counts(Protocol):
    """Counts of processes, in a list or in memory that they share."""

    def __getitem__(self, index: int, /) -> int:
        """Return one of them."""

    def __setitem__(self, index: int, value: int, /) -> None:
        """Set one of them."""

    def __iter__(self) -> Iterator[int]:
        """All of them."""


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """Where it is written what the requests of a key use.

    Attributes:
        requests, tokens: three numbers each, at first 0; see `Budget`.
        running: requests that run, of each process.
        process: which of these this one is.
        locked: makes a context in which no other process is.
    """

    requests: Numbers
    tokens: Numbers
    running: Counts
    process: int = 0
    locked: Callable[[], AbstractContextManager[None]] = nullcontext

    @classmethod
    def of_one_process(cls) -> Self:
        """Return a record that one process writes."""
        return cls([0.0] * 3, [0.0] * 3, [0])


_LEFT, _COUNTED_AT, _PER_MINUTE = range(3)


class Budget:
    """An amount that may be used in each minute (a token bucket). It is refilled evenly, up to that of one minute.

    More may be used than is left; what is missing is refilled first. Of another limit the same amount has been used.
    """

    def __init__(self, per_minute: int, numbers: Numbers) -> None:
        """Start with the amount of one minute; 0: there is no limit.

        `numbers`: what was left, when it was counted, and the limit of which it was left; at first 0.
        """
        self.per_minute = per_minute
        self._numbers = numbers

    def left(self, now: float) -> float:
        """Return what may be used at once."""
        numbers = self._numbers
        left, per_minute = numbers[_LEFT], numbers[_PER_MINUTE]
        left = min(left + (now - numbers[_COUNTED_AT]) * per_minute / _MINUTE, per_minute)
        left = min(left + self.per_minute - per_minute, float(self.per_minute))
        numbers[_LEFT], numbers[_COUNTED_AT], numbers[_PER_MINUTE] = left, now, self.per_minute
        return left

    def use(self, amount: float, now: float) -> None:
        """Take an amount."""
        if self.per_minute:
            self._numbers[_LEFT] = self.left(now) - amount

    def seconds_until(self, amount: float, now: float) -> float:
        """Return the time until an amount is left, which is at most that of a minute; 0 if it is now."""
        return max(0.0, amount - self.left(now)) * _MINUTE / self.per_minute if self.per_minute else 0.0

    def headers(self, unit: str, now: float) -> dict[str, str]:
        """OpenAI's headers with the limit, what is left of it, and the time until nothing is used of it."""
        if not self.per_minute:
            return {}
        return {
            f"x-ratelimit-limit-{unit}": str(self.per_minute),
            f"x-ratelimit-remaining-{unit}": str(max(0, math.floor(self.left(now)))),
            f"x-ratelimit-reset-{unit}": _duration(self.seconds_until(self.per_minute, now)),
        }


class KeyUsage:
    """What the requests of one key use."""

    def __init__(
        self, limits: Limits = NO_LIMITS, clock: Clock = time.monotonic, record: UsageRecord | None = None
    ) -> None:
        """`record`: where it is written, if several processes do that."""
        self._clock = clock
        self._limits = limits
        self._record = record or UsageRecord.of_one_process()
        self._requests = Budget(limits.requests_per_minute, self._record.requests)
        self._tokens = Budget(limits.tokens_per_minute, self._record.tokens)

    @property
    def running(self) -> int:
        """Number of requests and realtime sessions that have not ended."""
        return sum(self._record.running)

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return self._limits != NO_LIMITS

    def set_limits(self, limits: Limits) -> None:
        """Replace the limits. What has been used counts for the new ones."""
        self._settle()
        self._requests.per_minute = limits.requests_per_minute
        self._tokens.per_minute = limits.tokens_per_minute
        self._limits = limits
        self._settle()

    def _settle(self) -> None:
        """Refill the budgets by the limits that they have had."""
        with self._record.locked():
            now = self._clock()
            self._requests.left(now)
            self._tokens.left(now)

    def begin(self) -> Excess | None:
        """Let a request begin, which `end` ends; or return why it may not."""
        with self._record.locked():
            excess = self._excess()
            if excess is None:
                self._requests.use(1, self._clock())
                self._record.running[self._record.process] += 1
            return excess

    def end(self) -> None:
        """End a request."""
        with self._record.locked():
            self._record.running[self._record.process] -= 1

    def excess(self) -> Excess | None:
        """Return why no further request may begin; None if it may."""
        with self._record.locked():
            return self._excess()

    def _excess(self) -> Excess | None:
        now, limits = self._clock(), self._limits
        if limits.max_concurrent_requests and self.running >= limits.max_concurrent_requests:
            return Excess(
                "concurrency",
                f"This API key has {self.running} requests that are being answered, and may have "
                f"{limits.max_concurrent_requests} at once (max-concurrent-requests).",
                _BUSY_SECONDS,
            )
        if wait := self._requests.seconds_until(1, now):
            return Excess(
                "requests",
                f"This API key may send {limits.requests_per_minute} requests per minute (requests-per-minute).",
                wait,
            )
        if wait := self._tokens.seconds_until(1, now):
            return Excess(
                "tokens",
                f"This API key may use {limits.tokens_per_minute} tokens per minute (tokens-per-minute).",
                wait,
            )
        return None

    def use_tokens(self, count: int) -> None:
        """Take tokens that a request has used."""
        with self._record.locked():
            self._tokens.use(count, self._clock())

    def headers(self) -> dict[str, str]:
        """OpenAI's headers about the limits per minute."""
        with self._record.locked():
            now = self._clock()
            return {**self._requests.headers("requests", now), **self._tokens.headers("tokens", now)}


def _duration(seconds: float) -> str:
    """A time as in OpenAI's headers: `20ms`, `12s` or `6m0s`, rounded up."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, seconds = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
