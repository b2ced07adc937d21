"""Divides something that the server has a limited amount of among tenants."""

from __future__ import annotations

from collections import Counter
from typing import Literal

_ROUNDING = 1e-9
Refusal = Literal["full", "share"]


class Shares:
    """What tenants hold of a capacity: places of a queue, slots of an engine, bytes.

    A tenant may hold up to `share` of what the others leave. So one that is alone can use most of the capacity, two can
    use nearly the same, and there is always room for one that comes later.

    Attributes:
        capacity: what all tenants may hold together.
    """

    def __init__(self, capacity: int, share: float = 1.0) -> None:
        """`share`: a number above 0; 1: the first to come may hold everything."""
        self.capacity = capacity
        self._share = share
        self._used = 0
        self._held = Counter[str]()

    @property
    def used(self) -> int:
        """What all tenants hold."""
        return self._used

    @property
    def used_here(self) -> int:
        """What they hold in this process, if several processes count."""
        return self._used

    @property
    def most(self) -> int:
        """What a tenant may hold that is alone."""
        return self._part_of(self.capacity)

    def held(self, tenant: str) -> int:
        """Return what a tenant holds."""
        return self._held[tenant]

    def limit(self, tenant: str) -> int:
        """Return what a tenant may hold while the others hold what they hold now."""
        return self._part_of(self.capacity - self.used + self.held(tenant))

    def refusal(self, tenant: str, count: int = 1) -> Refusal | None:
        """Return why a tenant cannot take more: it is not free, or the tenant holds its share. None if it can."""
        if self.used + count > self.capacity:
            return "full"
        return "share" if self.held(tenant) + count > self.limit(tenant) else None

    def take_if_free(self, tenant: str, count: int = 1) -> Refusal | None:
        """Let a tenant hold more if `refusal` allows it; else return why not."""
        refusal = self.refusal(tenant, count)
        if refusal is None:
            self.take(tenant, count)
        return refusal

    def take(self, tenant: str, count: int = 1) -> None:
        """Let a tenant hold more, which `refusal` allows."""
        self._used += count
        self._held[tenant] += count

    def give_back(self, tenant: str, count: int = 1) -> None:
        """Let a tenant hold less."""
        self._used -= count
        self._held[tenant] -= count
        if not self._held[tenant]:
            del self._held[tenant]

    def _part_of(self, count: int) -> int:
        return max(1, int(self._share * count + _ROUNDING))
