"""Weighted fair queueing of requests."""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairClock:
    """Virtual time, counted in tokens, by which each flow of requests gets an equal share of the engine.

    Start-time fair queueing (Goyal et al. 1996): a request starts when its flow's last one has finished, or now if that
    is later. Those that finish first are served first, so a short request of an idle flow waits for no other flow's
    batch, and the requests of a flow keep their order.
    """

    def __init__(self) -> None:
        self._now = 0
        self._finish: dict[str, int] = {}  # of the last request of each flow

    def add(self, flow: str, tokens: int) -> tuple[int, int]:
        """Start and finish of a new request."""
        start = max(self._now, self._finish.get(flow, 0))
        self._finish[flow] = start + tokens
        return start, start + tokens

    def advance(self, start: int) -> None:
        """A request with this start is served."""
        self._now = max(self._now, start)

    def end_busy_period(self) -> None:
        """No request waits: move the virtual time to the last finish of all flows, and forget the flows."""
        self._now = max(self._finish.values(), default=self._now)
        self._finish.clear()

    def forget_idle(self) -> None:
        """Forget flows whose last request has finished."""
        self._finish = {flow: finish for flow, finish in self._finish.items() if finish > self._now}

    def __len__(self) -> int:
        return len(self._finish)


class FairQueue(Generic[Item]):
    """A queue of requests in the order of a `FairClock`."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, int, Item]] = []  # priority, finish, arrival, start
        self._clock = FairClock()
        self._arrivals = itertools.count()

    def push(self, item: Item, flow: str, tokens: int, priority: int = 0) -> None:
        """Add a request; smaller priorities are served first."""
        start, finish = self._clock.add(flow, tokens)
        heapq.heappush(self._heap, (priority, finish, next(self._arrivals), start, item))

    def peek(self) -> Item | None:
        """The next request; None if there is none."""
        return self._heap[0][-1] if self._heap else None

    def pop(self) -> Item:
        """Take the next request."""
        _, _, _, start, item = heapq.heappop(self._heap)
        self._clock.advance(start)
        if not self._heap:
            self._clock.end_busy_period()
        elif len(self._clock) > 2 * len(self._heap) + 64:
            self._clock.forget_idle()
        return item

    def __len__(self) -> int:
        return len(self._heap)
