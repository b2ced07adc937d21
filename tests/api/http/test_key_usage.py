"""Limits per minute: what is refused, for how long, and what clients read about it."""

from __future__ import annotations

import pytest

from quire.api.http.key_usage import Excess, KeyUsage, Limits


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def excess_of(usage: KeyUsage) -> Excess:
    excess = usage.excess()
    assert excess is not None
    return excess


def test_requests_are_refilled_evenly() -> None:
    clock = Clock()
    usage = KeyUsage(Limits(requests_per_minute=6), clock)
    for left in (5, 4, 3, 2, 1, 0):
        assert usage.begin() is None
        usage.end()
        assert usage.headers()["x-ratelimit-remaining-requests"] == str(left)
    excess = excess_of(usage)
    assert excess.reason == "requests"
    assert excess.seconds == pytest.approx(10)
    assert "6 requests per minute" in excess.message
    assert usage.headers() == {
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
    }
    clock.now += 9.5
    assert excess_of(usage).seconds == pytest.approx(0.5)
    clock.now += 0.5
    assert usage.excess() is None
    clock.now += 10_000
    assert usage.headers()["x-ratelimit-remaining-requests"] == "6", "no more than in a minute"
    assert usage.headers()["x-ratelimit-reset-requests"] == "0ms"


def test_tokens_are_taken_afterwards_and_what_is_missing_is_waited_for() -> None:
    clock = Clock()
    usage = KeyUsage(Limits(tokens_per_minute=600), clock)
    usage.use_tokens(599)
    assert usage.excess() is None
    usage.use_tokens(301)
    excess = excess_of(usage)
    assert excess.reason == "tokens"
    assert excess.seconds == pytest.approx(30.1)
    assert usage.headers()["x-ratelimit-remaining-tokens"] == "0"
    assert usage.headers()["x-ratelimit-reset-tokens"] == "1m30s"
    clock.now += 30.2
    assert usage.excess() is None


def test_concurrent_requests_are_counted_until_they_end() -> None:
    usage = KeyUsage(Limits(max_concurrent_requests=2))
    assert usage.begin() is None
    assert usage.begin() is None
    refused = usage.begin()
    assert refused is not None
    assert refused.reason == "concurrency"
    assert usage.running == 2
    usage.end()
    assert usage.excess() is None
    usage.end()
    assert usage.running == 0
    assert usage.headers() == {}


def test_new_limits_count_what_was_used() -> None:
    clock = Clock()
    usage = KeyUsage(Limits(requests_per_minute=10), clock)
    for _ in range(4):
        assert usage.begin() is None
        usage.end()
    usage.set_limits(Limits(requests_per_minute=5, tokens_per_minute=100))
    assert usage.headers()["x-ratelimit-remaining-requests"] == "1"
    assert usage.headers()["x-ratelimit-remaining-tokens"] == "100"
    usage.set_limits(Limits(requests_per_minute=5, tokens_per_minute=100))
    assert usage.headers()["x-ratelimit-remaining-requests"] == "1"
    usage.set_limits(Limits())
    assert not usage.is_limited
    assert usage.excess() is None
    assert usage.headers() == {}


@pytest.mark.parametrize(("used", "text"), [(1, "100ms"), (9, "900ms"), (10, "1s"), (599, "1m0s"), (601, "1m1s")])
def test_times_are_written_as_openai_does(used: int, text: str) -> None:
    usage = KeyUsage(Limits(tokens_per_minute=600), Clock())
    usage.use_tokens(used)
    assert usage.headers()["x-ratelimit-reset-tokens"] == text
