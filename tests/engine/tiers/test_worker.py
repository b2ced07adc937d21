"""The thread of a tier: what is forgotten is not found again whatever the disk does, and steps never wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typing_extensions import Buffer

from quire.engine.tiers import worker as module
from quire.engine.tiers.disk import DiskTier
from quire.engine.tiers.tier import Tier
from quire.engine.tiers.worker import TierWorker
from tests.support.patience import PATIENCE
from tests.support.process import eventually

BLOCK = 64


class SlowTier(Tier):
    """Blocks in memory, behind a disk that answers only while `answers` is set. Its use by other threads is refused."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Event()
        self.fails = False
        self._owner = threading.get_ident()

    def _wait(self) -> None:
        assert threading.get_ident() != self._owner, "a step waits for the disk"
        self.asked.set()
        assert self.answers.wait(PATIENCE)
        if self.fails:
            raise RuntimeError("the disk has gone")

    @property
    def nbytes(self) -> int:
        if threading.get_ident() != self._owner:
            self._wait()
        return len(self.blocks) * BLOCK

    def has(self, key: bytes) -> bool:
        return key in self.blocks

    def get(self, key: bytes) -> bytes | None:
        self._wait()
        return self.blocks.get(key)

    def put(self, key: bytes, data: Buffer) -> bool:
        self._wait()
        self.blocks[key] = bytes(data)
        return True

    def touch(self, keys: Iterable[bytes]) -> None:
        self._wait()

    def evict(self, keys: Iterable[bytes]) -> None:
        self._wait()
        for key in keys:
            self.blocks.pop(key, None)

    def clear(self) -> None:
        self._wait()
        self.blocks.clear()

    def take_removed(self) -> list[bytes]:
        return []

    def refresh(self) -> None:
        self._wait()

    def close(self) -> None:
        pass


def key(number: int) -> bytes:
    return number.to_bytes(32)


@contextmanager
def running(tier: Tier, *, tracks_changes: bool = False) -> Iterator[TierWorker]:
    worker = TierWorker(tier, BLOCK, 16 * BLOCK, tracks_changes=tracks_changes)
    try:
        yield worker
    finally:
        if isinstance(tier, SlowTier):
            tier.answers.set()
        worker.close(PATIENCE)


@contextmanager
def waiting(tier: SlowTier, worker: TierWorker) -> Iterator[None]:
    """The disk does not answer, and the thread waits for it."""
    tier.answers.clear()
    tier.asked.clear()
    worker.touch([key(0)])
    assert tier.asked.wait(PATIENCE)
    try:
        yield
    finally:
        tier.answers.set()


FORGET: list[Callable[[TierWorker], None]] = [lambda worker: worker.evict([key(1)]), lambda worker: worker.clear()]


@pytest.mark.parametrize("forget", FORGET)
def test_a_block_that_is_forgotten_is_not_found_before_the_disk_has_done_so(
    forget: Callable[[TierWorker], None],
) -> None:
    """It may hold NaN: the request that is computed again must not read it again."""
    tier = SlowTier()
    tier.blocks[key(1)] = b"bad" * BLOCK
    with running(tier) as worker:
        with waiting(tier, worker):
            assert worker.has(key(1))
            forget(worker)
            assert not worker.has(key(1))
            assert worker.put(key(1), b"good" * BLOCK)
        eventually(lambda: worker.has(key(1)))
        assert tier.blocks == {key(1): b"good" * BLOCK}


@pytest.mark.parametrize("forget", FORGET)
def test_what_is_forgotten_at_the_end_is_not_there_after_a_restart(
    tmp_path: Path, forget: Callable[[TierWorker], None]
) -> None:
    tier = DiskTier(tmp_path, "model", BLOCK, 1 << 20)
    tier.put(key(1), bytes(BLOCK))
    with running(tier) as worker:
        forget(worker)
    assert not DiskTier(tmp_path, "model", BLOCK, 1 << 20).has(key(1))


def test_what_waits_for_a_disk_that_does_not_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_EVICTIONS", 100)
    tier = SlowTier()
    tier.blocks = {key(number): bytes(BLOCK) for number in range(1000)}
    with running(tier) as worker:
        with waiting(tier, worker):
            for number in range(500):
                worker.evict([key(number)])
                worker.touch([key(number)])
                assert len(worker._evictions) <= 100
            assert len(worker._touches) < 300
            assert not any(worker.has(key(number)) for number in range(500))
            assert worker.nbytes == 1000 * BLOCK
        eventually(lambda: worker.nbytes == 0)


def test_a_thread_that_fails_leaves_nothing_that_is_waited_for() -> None:
    tier = SlowTier()
    tier.blocks[key(1)] = bytes(BLOCK)
    with running(tier, tracks_changes=True) as worker:
        worker.in_memory(key(1))
        assert worker.take_changes().stored == [key(1)]
        with waiting(tier, worker):
            for number in range(2, 10):
                worker.put(key(number), bytes(BLOCK))
            tier.fails = True
        eventually(lambda: not worker.unwritten)
        assert not worker.has(key(1))
        assert worker.take_changes().removed == [key(1)]  # those who follow the cache do not look for it here
        assert not worker.put(key(1), bytes(BLOCK))
