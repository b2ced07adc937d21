"""The bodies of requests while they arrive, and until they are parsed: their total size has a bound."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from starlette.types import Scope

from quire.api.http.tenant import tenant_of
from quire.protocol.errors import ApiError, Overloaded

_PIECE = 64  # bytes that Python needs for each piece in which a body is received
_EXPECTED_RATE = 1 << 20  # bytes per second; a body that is slower is behind


class ArrivingBody:
    """One body.

    Attributes:
        scope: of its request.
        refuse: answers the request with an error, and closes its connection.
        size: bytes so far.
        arriving: it is not complete.
    """

    def __init__(self, bodies: ArrivingBodies, scope: Scope, refuse: Callable[[ApiError], None], now: float) -> None:
        self.scope = scope
        self.refuse = refuse
        self.size = 0
        self.arriving = True
        self._bodies = bodies
        self._began = now

    def behind(self, now: float) -> float:
        """Seconds that it is late, measured by the expected rate."""
        return now - self._began - self.size / _EXPECTED_RATE

    def release(self) -> None:
        """Count its bytes no more."""
        self._bodies.release(self)


class ArrivingBodies:
    """All bodies that are arriving or being parsed.

    When they exceed the limit, some are refused: of the tenants that hold more than an equal share, those bodies that
    are most behind. So slow clients lose first, and they do not take the place of other tenants.

    Attributes:
        size: bytes of all bodies.
    """

    def __init__(self, limit: int) -> None:
        self.size = 0
        self._limit = limit
        self._bodies: set[ArrivingBody] = set()

    def __len__(self) -> int:
        return len(self._bodies)

    def begin(self, scope: Scope, refuse: Callable[[ApiError], None]) -> ArrivingBody:
        """A new body, of which nothing has been received."""
        body = ArrivingBody(self, scope, refuse, time.monotonic())
        self._bodies.add(body)
        return body

    def receive(self, body: ArrivingBody, size: int, *, new_piece: bool) -> None:
        """Count bytes of a body; other bodies may be refused for it.

        Raises:
            Overloaded: this body must not go on.
        """
        if body not in self._bodies:
            return
        size += _PIECE if new_piece else 0
        body.size += size
        self.size += size
        while self.size > self._limit:
            loser = self._loser()
            self.release(loser)
            error = Overloaded(
                "The server holds as many bytes of request bodies as it may (--max-total-body-size), and this body "
                "arrived too slowly to be finished first.",
                headers={"Retry-After": "1"},
            )
            if loser is body:
                raise error
            loser.refuse(error)

    def release(self, body: ArrivingBody) -> None:
        """Count the bytes of a body no more."""
        if body in self._bodies:
            self._bodies.remove(body)
            self.size -= body.size

    def _loser(self) -> ArrivingBody:
        now = time.monotonic()
        held: Counter[str] = Counter()
        arriving = []
        for body in self._bodies:
            tenant = tenant_of(body.scope)
            held[tenant] += body.size
            if body.arriving:
                arriving.append((tenant, body))
        share = self.size / len(held)
        above = [body for tenant, body in arriving if held[tenant] >= share]
        return max(above or [body for _, body in arriving], key=lambda body: body.behind(now))
