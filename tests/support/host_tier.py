"""Engines on the CPU whose device counts as one with memory of its own, so that the host's memory is a tier."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from quire.engine.core.host_tier import HostTier
from quire.engine.core.offload import Offload
from quire.engine.execution.cache import KVCache
from quire.engine.execution.devices.host import CpuDevice
from quire.engine.execution.host_blocks import Copy, HostBlocks
from quire.engine.execution.pinned import Event
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.scheduling.tier_blocks import LoadRule
from tests.support.engine import Engine
from tests.support.patience import PATIENCE


class DeviceWithMemory(CpuDevice):
    """A CPU that pretends to have memory of its own."""

    has_memory = True


class AlwaysLoads(LoadRule):
    """Load however fast the machine is at this moment."""

    @override
    def loads(self, *_: Any, **__: Any) -> bool:
        return True

    @override
    def patience(self, tokens: int) -> float:
        return PATIENCE


class LateEvent(Event):
    """Is reached after it was looked at some times; then its copies and those before it are made."""

    def __init__(self, make: Callable[[LateEvent], None], looks: int) -> None:
        self._make = make
        self._looks = looks
        self.is_reached = False

    def record(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        self._looks -= 1
        if self._looks < 0:
            self.synchronize()
        return self.is_reached

    def synchronize(self) -> None:
        self._make(self)


class LateCopies(HostBlocks):
    """Copies that are made as late as a device may make them: when somebody waits for them, or has looked often."""

    looks = 60

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._waiting: deque[tuple[LateEvent, Callable[[], Event]]] = deque()
        self.held_steps = 0

    @override
    def save(self, cache: KVCache, copies: Sequence[Copy]) -> Event:
        return self._later(partial(super().save, cache, list(copies)))

    @override
    def restore(self, cache: KVCache, copies: Sequence[Copy]) -> Event:
        return self._later(partial(super().restore, cache, list(copies)))

    @override
    def hold_steps(self, event: Event) -> None:
        assert isinstance(event, LateEvent)
        self.held_steps += 1
        event.synchronize()

    def _later(self, copy: Callable[[], Event]) -> Event:
        event = LateEvent(self._make_until, self.looks)
        self._waiting.append((event, copy))
        return event

    def _make_until(self, event: LateEvent) -> None:
        while not event.is_reached:
            made, copy = self._waiting.popleft()
            copy()
            made.is_reached = True


def tier_of(engine: Engine) -> HostTier:
    """The tier of an engine."""
    offload = engine.core._offload
    assert isinstance(offload, Offload)
    assert isinstance(offload._store, HostTier)
    return offload._store


@contextmanager
def host_engine(folder: Path, rows: int, block_bytes: int, **options: Any) -> Iterator[Engine]:
    """An engine whose host memory has room for so many blocks, and that loads them whenever it can."""
    options = {"block_size": 4, **options}
    size = (rows + 0.5) * block_bytes / 2**30
    engine = Engine(folder, device=DeviceWithMemory(), kv_offloading_size=size, **options)
    scheduler = engine.core.scheduler
    assert isinstance(scheduler, Scheduler)
    assert scheduler.loads is not None
    scheduler.loads.rule = AlwaysLoads(1)
    try:
        yield engine
    finally:
        engine.core.close()
