"""Bounds the memory of all pooled results, from before they are computed until their clients have read them."""

from __future__ import annotations

from quire.protocol.errors import Overloaded, TooManyRequests
from quire.workers.shares import Shares

_SMALL = 1 << 14  # numbers of a request that are not counted: --limit-concurrency bounds such requests
LARGEST_RESULTS = 1 << 28  # numbers, of 4 bytes each


class ResultMemory:
    """Count the values held for all requests."""

    def __init__(self, limit: int = LARGEST_RESULTS, share: float = 1.0) -> None:
        """`limit`: numbers in all; `share`: of these for one tenant."""
        self._shares = Shares(limit, share)

    @property
    def held(self) -> int:
        """Numbers that are held now."""
        return self._shares.used

    def reservation(self, tenant: str) -> Reservation:
        """A reservation of this tenant's request, which holds nothing yet."""
        return Reservation(self, tenant)

    def take(self, tenant: str, count: int) -> None:
        """Hold more numbers for a tenant.

        Raises:
            Overloaded: there is no room for them.
            TooManyRequests: the tenant has its share.
        """
        retry = {"Retry-After": "1"}
        match self._shares.refusal(tenant, count):
            case "full":
                text = "The memory for results of pooling requests is full. Please retry later."
                raise Overloaded(text, headers=retry)
            case "share":
                text = "This client has its share of the memory for results of pooling requests (--max-client-share)."
                raise TooManyRequests(text, headers=retry)
        self._shares.take(tenant, count)

    def give_back(self, tenant: str, count: int) -> None:
        """Hold fewer numbers for a tenant."""
        self._shares.give_back(tenant, count)


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
