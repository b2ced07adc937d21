"""Turns of the event loop: long or numerous work is done in slices, of which the loop runs one per iteration.

`asyncio.sleep(0)` gives way to others, but then every task that slices its work runs one slice in each iteration: with
hundreds of such tasks an iteration takes a second. Here they queue. An iteration takes as long as one slice, however
many of them wait, and everything else is served in between.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from weakref import WeakKeyDictionary

# Flows of slices that belong to the server, not to a tenant. Tenants and these take turns.
ARRIVALS = " arrivals"  # requests begin to be answered
ENDINGS = " endings"  # requests are ended from outside: deadlines, closed connections, a stopped engine


class Turns:
    """The queue of an event loop. First in, first out for each flow; flows take turns."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: OrderedDict[str, deque[Callable[[], bool]]] = OrderedDict()  # the first flow's turn is next
        self._taken = False  # this iteration has its slice, or slices wait

    async def take(self, flow: str) -> None:
        """Wait until the caller may run a slice: not at all, unless there has been one in this iteration."""
        if not self._taken:
            self._take()
            return
        turn = self._loop.create_future()

        def begin() -> bool:
            if turn.done():  # cancelled
                return False
            turn.set_result(None)
            return True

        self._put(flow, begin)
        await turn

    def run(self, flow: str, work: Callable[[], None]) -> None:
        """Call a function when its turn has come: at once, or in a later iteration."""
        if not self._taken:
            self._take()
            work()
            return

        def begin() -> bool:
            work()
            return True

        self._put(flow, begin)

    def _take(self) -> None:
        self._taken = True
        self._loop.call_soon(self._next)

    def _put(self, flow: str, begin: Callable[[], bool]) -> None:
        self._waiting.setdefault(flow, deque()).append(begin)

    def _next(self) -> None:
        """Begin the next slice. A task that is woken runs before this is called again."""
        if not self._waiting:
            self._taken = False
            return
        try:
            while self._waiting and not self._pop()():
                pass
        finally:
            self._loop.call_soon(self._next)

    def _pop(self) -> Callable[[], bool]:
        flow, waiting = next(iter(self._waiting.items()))
        begin = waiting.popleft()
        if waiting:
            self._waiting.move_to_end(flow)
        else:
            del self._waiting[flow]
        return begin


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()


def turns() -> Turns:
    """The turns of the running event loop."""
    loop = asyncio.get_running_loop()
    queue = _turns.get(loop)
    if queue is None:
        queue = _turns[loop] = Turns(loop)
    return queue
