"""Slots: how many sequences may be in an engine at the same time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import override

from quire.engine.wire.batch import BatchClient
from quire.engine.wire.errors import EngineOverloaded
from quire.engine.wire.protocol import StepStats
from quire.engine.wire.records import NullObserver, Observer


class SlotClient(BatchClient, ABC):
    """The part of the client of an engine that counts sequences.

    Attributes:
        observer: receives the events of the engine.
        capacity: number of sequences that may run or wait at the same time.
        slots_in_use: number of sequences that run, wait, or are being prepared.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: see the attribute."""
        self.observer: Observer = NullObserver()
        self.capacity = capacity
        self.slots_in_use = 0

    @property
    @abstractmethod
    def stats(self) -> StepStats:
        """Statistics after the engine's last step."""

    @abstractmethod
    def check_new(self) -> None:
        """Raise EngineDead or EngineAsleep if the engine takes no new requests."""

    @contextmanager
    def slots(self, count: int) -> Iterator[None]:
        """Reserve slots for sequences, before their prompts are prepared.

        Raises:
            EngineDead: the engine has stopped.
            EngineAsleep: it sleeps, or is about to.
            EngineOverloaded: there are too few free slots.
        """
        self.check_new()
        if self.slots_in_use + count > self.capacity:
            self.observer.on_overload()
            raise EngineOverloaded(
                f"The server is busy: {self.slots_in_use} of at most {self.capacity} sequences are running or waiting; "
                f"this request needs {count}.",
                retry_after=1 + self.stats.waiting // max(1, self.stats.running),
            )
        self.slots_in_use += count
        try:
            yield
        finally:
            self.slots_in_use -= count

    @override
    def take_slot(self) -> bool:
        free = self.slots_in_use < self.capacity // 2
        self.slots_in_use += free
        return free

    @override
    def release_slots(self, count: int) -> None:
        self.slots_in_use -= count
