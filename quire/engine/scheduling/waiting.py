"""WaitingQueue: the requests that are not in the batch, in the order in which they enter it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping

from quire.engine.client.protocol import AddRequest
from quire.engine.scheduling.fair_queue import FairClock
from quire.engine.scheduling.request import Request


class WaitingQueue:
    """A heap, which may hold requests that have left the scheduler."""

    def __init__(self, requests: Mapping[str, Request], *, by_priority: bool, fair: bool) -> None:
        """`requests`: all that have not finished, by id; for the other arguments see `Scheduler`."""
        self._requests = requests
        self._by_priority = by_priority
        self._fair = FairClock() if fair else None
        self._heap: list[tuple[tuple[int, ...], Request]] = []
        self._aside: list[Request] = []
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        """Entries, including those of requests that have left."""
        return len(self._heap)

    def assign_sort_key(self, message: AddRequest) -> tuple[tuple[int, ...], int]:
        """`Request.sort_key` and `Request.start` of a new request."""
        arrival, flow = next(self._arrivals), message.flow or message.request_id
        start, finish = (0, 0) if self._fair is None else self._fair.add(flow, len(message.prompt))
        return (message.priority if self._by_priority else 0, finish, arrival), start

    def push(self, request: Request) -> None:
        """Add a request, which is not in the queue."""
        heapq.heappush(self._heap, (request.sort_key, request))

    def first(self) -> Request | None:
        """The request that comes next; None if none waits."""
        while self._heap:
            request = self._heap[0][1]
            if self._requests.get(request.id) is request:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> None:
        """Remove the first request, which is served now."""
        _, request = heapq.heappop(self._heap)
        if self._fair is not None:
            self._fair.advance(request.start)
            if self._heap or self._aside:
                self._fair.forget_idle()
            else:
                self._fair.end_busy_period()

    @property
    def num_aside(self) -> int:
        """Requests that were set aside."""
        return len(self._aside)

    def set_aside(self) -> None:
        """Let others pass the first request, until `restore`."""
        self._aside.append(heapq.heappop(self._heap)[1])

    def restore(self) -> None:
        """Put back those that were set aside."""
        for request in self._aside:
            self.push(request)
        self._aside.clear()

    def compact(self, live: int) -> None:
        """Remove requests that have left, once they are half of the entries: so amortised O(1) each.

        `live`: requests that wait.
        """
        if len(self._heap) > 2 * live:
            self._heap = [entry for entry in self._heap if self._requests.get(entry[1].id) is entry[1]]
            heapq.heapify(self._heap)

    def ids(self) -> set[str]:
        """Ids of the requests that wait."""
        return {request.id for _, request in self._heap if self._requests.get(request.id) is request}
