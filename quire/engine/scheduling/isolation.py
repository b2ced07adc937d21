"""Isolation: which requests are computed in steps of their own, after a step that failed."""

from __future__ import annotations

from operator import attrgetter

from quire.engine.scheduling.request import Request

_SORT_KEY = attrgetter("sort_key")


class Isolation:
    """The requests of failed steps, until they are computed as far as they were.

    A step that fails may have changed the states of all of its sequences. They are computed again, each alone: so the
    step fails again for the request alone that makes it fail, and for a request whose step fails only with others the
    second attempt gives at least one token.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def add(self, request: Request, end: int) -> None:
        """Compute a request alone up to a position."""
        request.alone_until = end
        if request not in self._requests:
            self._requests.append(request)
            self._requests.sort(key=_SORT_KEY)

    def discard(self, request: Request) -> None:
        """Forget a request that has ended, if it is there."""
        if request.alone_until and request in self._requests:
            self._requests.remove(request)

    def next(self, waiting: Request | None) -> Request | None:
        """Return the request that the next step computes alone; None: there is none.

        `waiting`: the one that enters the batch next.
        """
        if not self._requests:
            return None
        for request in self._requests.copy():
            if request.num_computed_tokens >= request.alone_until:
                request.alone_until = 0
                self._requests.remove(request)
        return next((request for request in self._requests if request.in_batch or request is waiting), None)
