"""What the requests of an API key use, and the limits of it: requests and tokens per minute, concurrent requests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

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


class Budget:
    """An amount that may be used in each minute (a token bucket). It is refilled evenly, up to that of one minute.

    More may be used than is left; what is missing is refilled first.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        """Start with the amount of one minute; 0: there is no limit."""
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._counted_at = now

    def left(self, now: float) -> float:
        """Return what may be used at once."""
        refilled = (now - self._counted_at) * self.per_minute / _MINUTE
        self._left = min(self._left + refilled, float(self.per_minute))
        self._counted_at = now
        return self._left

    def use(self, amount: float, now: float) -> None:
        """Take an amount."""
        if self.per_minute:
            self._left = self.left(now) - amount

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

    def resized(self, per_minute: int, now: float) -> Budget:
        """The budget with another limit, from which the same amount has been used."""
        budget = Budget(per_minute, now)
        budget.use(self.per_minute - self.left(now), now)
        return budget


class KeyUsage:
    """What the requests of one key use.

    Attributes:
        running: requests and realtime sessions that have not ended.
    """

    def __init__(self, limits: Limits = NO_LIMITS, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._limits = limits
        self._requests = Budget(limits.requests_per_minute, clock())
        self._tokens = Budget(limits.tokens_per_minute, clock())
        self.running = 0

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return self._limits != NO_LIMITS

    def set_limits(self, limits: Limits) -> None:
        """Replace the limits. What has been used counts for the new ones."""
        now = self._clock()
        self._requests = self._requests.resized(limits.requests_per_minute, now)
        self._tokens = self._tokens.resized(limits.tokens_per_minute, now)
        self._limits = limits

    def excess(self) -> Excess | None:
        """Return why no further request may begin; None if it may."""
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

    @contextmanager
    def request(self) -> Iterator[None]:
        """A context in which a request is being answered."""
        self._requests.use(1, self._clock())
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def use_tokens(self, count: int) -> None:
        """Take tokens that a request has used."""
        self._tokens.use(count, self._clock())

    def headers(self) -> dict[str, str]:
        """OpenAI's headers about the limits per minute."""
        now = self._clock()
        return {**self._requests.headers("requests", now), **self._tokens.headers("tokens", now)}


def _duration(seconds: float) -> str:
    """A time as in OpenAI's headers: `20ms`, `12s` or `6m0s`, rounded up."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, seconds = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
