"""Bounds the memory of all pooled results, from before they are computed until their clients have read them."""

from __future__ import annotations

from collections import Counter

from quire.api.http.errors import Overloaded

_SMALL = 1 << 14  # numbers of a request that are not counted: --limit-concurrency bounds such requests
_LIMIT = 1 << 28  # numbers, of 4 bytes each


class ResultMemory:
    """Counts the values held for all requests. A tenant may hold as many as all tenants leave free, so at most half."""

    def __init__(self, limit: int = _LIMIT) -> None:
        """`limit`: numbers in all."""
        self.limit = limit
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        """Numbers that are held now."""
        return self._held.total()

    def reservation(self, tenant: str) -> Reservation:
        """A reservation of this tenant's request, which holds nothing yet."""
        return Reservation(self, tenant)

    def take(self, tenant: str, count: int) -> None:
        """Hold more numbers for a tenant.

        Raises:
            Overloaded: there is no room for them.
        """
        if self._held[tenant] + count > self.limit - self.held:
            raise Overloaded(
                "The memory for results of pooling requests is full. Please retry later.",
                headers={"Retry-After": "1"},
            )
        self._held[tenant] += count

    def give_back(self, tenant: str, count: int) -> None:
        """Hold fewer numbers for a tenant."""
        self._held[tenant] -= count
        if not self._held[tenant]:
            del self._held[tenant]


class Reservation:
    """The numbers that one request holds until it is closed.

    Attributes:
        values: number of values, also while it is too small to be counted.
    """

    def __init__(self, memory: ResultMemory, tenant: str) -> None:
        self._memory = memory
        self._tenant = tenant
        self._counted = 0
        self.values = 0

    def grow(self, count: int) -> None:
        """Add the results of some inputs, before they are computed.

        Raises:
            Overloaded: there is no room for them.
        """
        self.values += count
        if self.values > _SMALL:
            self._memory.take(self._tenant, self.values - self._counted)
            self._counted = self.values

    def close(self) -> None:
        """Give them back."""
        counted, self._counted = self._counted, 0
        if counted:
            self._memory.give_back(self._tenant, counted)
