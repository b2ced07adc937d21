"""Slots: how many sequences may be in an engine at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import override

from quire.engine.client.engine import Engine
from quire.engine.client.errors import EngineOverloaded, TenantOverloaded
from quire.engine.client.protocol import StepStats
from quire.engine.client.records import Observers
from quire.workers.shares import Shares


class Slots:
    """Count the sequences in an engine, those that are being prepared too, and those of each tenant."""

    def __init__(self, capacity: int, share: float, shares: Shares | None = None) -> None:
        """Begin with all slots free.

        Args:
            capacity: of sequences that may run or wait at the same time.
            share: of it for one tenant.
            shares: what tenants hold of them, if several processes count that.
        """
        self._shares = shares or Shares(capacity, share)

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self._shares.capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        self._shares.capacity = capacity

    @property
    def largest_request(self) -> int:
        """Number of slots that one request may have."""
        return self._shares.most

    @property
    def in_use(self) -> int:
        """Number of slots that are taken."""
        return self._shares.used

    @contextmanager
    def held(self, count: int, tenant: str, stats: StepStats, observers: Observers) -> Iterator[None]:
        """A context in which a tenant has slots.

        Args:
            count: number of slots.
            tenant: whose they are.
            stats: of the engine.
            observers: learn when there are too few.

        Raises:
            EngineOverloaded: there are too few free slots, or the tenant has its share.
        """
        try:
            self.take(count, tenant, 1 + stats.waiting // max(1, stats.running))
        except EngineOverloaded as error:
            is_share = isinstance(error, TenantOverloaded)
            observers.on_overload("max_client_share" if is_share else "max_num_queued_reqs")
            raise
        try:
            yield
        finally:
            self.give_back(count, tenant)

    def take(self, count: int, tenant: str, retry_after: int) -> None:
        """Take slots for a tenant. `retry_after`: seconds after which some are likely to be free, for the errors.

        Raises:
            EngineOverloaded: there are too few free slots, or the tenant has its share.
        """
        match self._shares.take_if_free(tenant, count):
            case "full":
                raise EngineOverloaded(
                    f"The server is busy: {self.in_use} of at most {self.capacity} sequences are running or "
                    f"waiting; this request needs {count}.",
                    retry_after,
                )
            case "share":
                raise TenantOverloaded(
                    f"{self._shares.held(tenant)} sequences of this client are running or waiting, and it may have "
                    f"{self._shares.limit(tenant)} at the moment (--max-client-share); this request needs {count}.",
                    retry_after,
                )

    def take_spare(self, tenant: str) -> bool:
        """Take one more slot if more than half of all are free, and the tenant may have more; return whether it did."""
        return self.in_use < self.capacity // 2 and self._shares.take_if_free(tenant) is None

    def give_back(self, count: int, tenant: str) -> None:
        """Free slots of a tenant."""
        self._shares.give_back(tenant, count)


class SlottedEngine(Engine):
    """An engine that counts its sequences in slots."""

    _slots: Slots

    @property
    @override
    def capacity(self) -> int:
        return self._slots.capacity

    @property
    @override
    def largest_request(self) -> int:
        return self._slots.largest_request

    @property
    @override
    def slots_in_use(self) -> int:
        return self._slots.in_use

    @override
    def take_slot(self, tenant: str) -> bool:
        return self._slots.take_spare(tenant)

    @override
    def release_slots(self, count: int, tenant: str) -> None:
        self._slots.give_back(count, tenant)
