"""Slots: how many sequences may be in an engine at the same time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import override

from quire.engine.client.batch import BatchClient
from quire.engine.client.errors import EngineOverloaded, TenantOverloaded
from quire.engine.client.protocol import StepStats
from quire.engine.client.records import NullObserver, Observer
from quire.workers.shares import Shares


class SlotClient(BatchClient, ABC):
    """The part of the client of an engine that counts sequences."""

    def __init__(self, capacity: int, share: float) -> None:
        """`capacity`: of sequences that may run or wait at the same time; `share`: of it for one tenant."""
        self.observer: Observer = NullObserver()  # receives the events of the engine
        self._slots = Shares(capacity, share)

    @property
    def capacity(self) -> int:
        """Number of sequences that may run or wait at the same time."""
        return self._slots.capacity

    @property
    def largest_request(self) -> int:
        """Number of sequences that one request may have: more than one tenant may have are never admitted."""
        return self._slots.most

    @property
    def slots_in_use(self) -> int:
        """Number of sequences that run, wait, or are being prepared."""
        return self._slots.used

    @property
    @abstractmethod
    def stats(self) -> StepStats:
        """Statistics after the engine's last step."""

    @abstractmethod
    def check_new(self) -> None:
        """Raise EngineDead or EngineAsleep if the engine takes no new requests."""

    @contextmanager
    def slots(self, count: int, tenant: str = "") -> Iterator[None]:
        """Reserve slots for sequences of a tenant, before their prompts are prepared.

        Raises:
            EngineDead: the engine has stopped.
            EngineAsleep: it sleeps, or is about to.
            EngineOverloaded: there are too few free slots, or the tenant has its share.
        """
        self.check_new()
        retry_after = 1 + self.stats.waiting // max(1, self.stats.running)
        match self._slots.refusal(tenant, count):
            case "full":
                self.observer.on_overload()
                raise EngineOverloaded(
                    f"The server is busy: {self.slots_in_use} of at most {self.capacity} sequences are running or "
                    f"waiting; this request needs {count}.",
                    retry_after,
                )
            case "share":
                raise TenantOverloaded(
                    f"{self._slots.held(tenant)} sequences of this client are running or waiting, and it may have "
                    f"{self._slots.limit(tenant)} at the moment (--max-client-share); this request needs {count}.",
                    retry_after,
                )
        self._slots.take(tenant, count)
        try:
            yield
        finally:
            self._slots.give_back(tenant, count)

    @override
    def take_slot(self, tenant: str) -> bool:
        free = self.slots_in_use < self.capacity // 2 and self._slots.refusal(tenant) is None
        if free:
            self._slots.take(tenant)
        return free

    @override
    def release_slots(self, count: int, tenant: str) -> None:
        self._slots.give_back(tenant, count)
