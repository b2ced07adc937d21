"""Requests that wait for blocks of a second tier, and blocks that leave memory for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from quire.engine.client.protocol import LoadSource
from quire.engine.scheduling.block_loads import BlockLoads
from quire.engine.scheduling.block_tables import BlockGroups
from quire.engine.scheduling.plan import NOT_FINITE, StepResult
from quire.engine.scheduling.request import BlockHash
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.scheduling.tier_blocks import LoadRule, UnsavedBlocks
from tests.support.scheduling import BLOCK, FakeRunner, make, request

PROMPT = range(41)


class FakeTier:
    """A tier of keys, whose loads the test ends."""

    def __init__(self) -> None:
        self.keys: set[BlockHash] = set()
        self.place: LoadSource = "disk"
        self.loads: dict[int, Sequence[BlockHash]] = {}
        self.cancelled: list[int] = []
        self.touched: list[BlockHash] = []

    def has(self, key: BlockHash) -> bool:
        return key in self.keys

    def slowest(self, keys: Sequence[BlockHash]) -> LoadSource:
        return self.place

    def load(self, serial: int, keys: Sequence[BlockHash]) -> None:
        assert all(map(self.has, keys))
        self.loads[serial] = keys

    def cancel(self, serial: int) -> None:
        self.cancelled.append(serial)

    def touch(self, keys: Sequence[BlockHash]) -> None:
        self.touched += keys

    def evict(self, keys: Iterable[BlockHash]) -> None:
        self.keys.difference_update(keys)

    def in_memory(self, key: BlockHash) -> None:
        pass

    def subscribers_forgot(self) -> None:
        pass


class Clock:
    """Seconds that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Setting:
    """A scheduler with a tier that has all blocks of the prompt, and none in memory."""

    def __init__(self, groups: BlockGroups | None = None, blocks: int = 64) -> None:
        self.tier, self.clock = FakeTier(), Clock()
        self.unsaved = UnsavedBlocks(self.tier)
        self.scheduler = make(
            blocks,
            groups=groups or BlockGroups(),
            tier=self.tier,
            load_rule=LoadRule(1, self.clock),
            observers=[self.unsaved],
        )
        loads = self.scheduler.loads
        assert loads is not None
        loads._clock = self.clock
        self.loads: BlockLoads = loads
        self.runner = FakeRunner(self.scheduler)
        self.content: dict[BlockHash, tuple[bool, tuple[int, ...]]] = {}  # what `FakeRunner` knows of saved blocks
        self.scheduler.add(request("before", PROMPT, 1))
        self.runner.run()
        self.save(100)
        self.scheduler.reset_prefix_cache(preempt=False)

    def save(self, count: int) -> None:
        for block, key in self.unsaved.take(count):
            self.tier.keys.add(key)
            self.content[key] = self.runner.written[block]

    def receive(self, serial: int, count: int) -> None:
        """Let the first blocks of a load arrive."""
        for index in range(count):
            block = self.loads.block(serial, index)
            assert block is not None
            self.runner.written[block] = self.content[self.tier.loads[serial][index]]
            self.loads.received(serial, index)
        self.scheduler.end_loads()
        self.scheduler.check()

    def load(self, name: str = "again") -> int:
        """Add a request that waits for the tier; returns the serial of its load."""
        self.scheduler.add(request(name, PROMPT, 1))
        self.runner.step()
        assert len(self.loads) == 1
        return max(self.tier.loads)


@pytest.fixture
def setting() -> Setting:
    return Setting()


def hits(scheduler: Scheduler, runner: FakeRunner) -> tuple[int, int]:
    """Prompt tokens of the next request that were found in memory, and in the tier."""
    plan = runner.step()
    assert plan.new
    return plan.stats.prefix_hits, plan.stats.external_hits


@pytest.mark.parametrize("windows", [(None,), (None, 8), (8,)])
def test_a_request_is_computed_behind_what_was_loaded(windows: tuple[int | None, ...]) -> None:
    setting = Setting(BlockGroups(windows))
    serial = setting.load()
    assert not setting.scheduler.has_work
    setting.receive(serial, len(setting.tier.loads[serial]))
    assert hits(setting.scheduler, setting.runner) == (0, 40)
    setting.runner.run()
    assert setting.scheduler.pool.num_used == 0
    assert setting.runner.ended["again"] == "length"


def test_others_run_while_a_request_waits(setting: Setting) -> None:
    serial = setting.load()
    setting.scheduler.add(request("other", range(100, 110), 3))
    setting.runner.run()
    assert "other" in setting.runner.ended
    assert "again" not in setting.runner.ended
    setting.receive(serial, 10)
    setting.runner.run()
    assert "again" in setting.runner.ended


def test_a_load_that_takes_longer_than_computing_is_given_up(setting: Setting) -> None:
    assert setting.loads.rule is not None
    setting.loads.rule.computed(1000, 1.0)
    serial = setting.load()
    setting.receive(serial, 3)
    setting.clock.now = 0.06
    setting.scheduler.end_loads()
    assert setting.tier.cancelled == [serial]
    assert hits(setting.scheduler, setting.runner) == (0, 3 * BLOCK)
    setting.runner.run()
    setting.scheduler.reset_prefix_cache(preempt=False)
    setting.scheduler.add(request("computed", PROMPT, 1))  # as loads were slow just now
    assert hits(setting.scheduler, setting.runner) == (0, 0)
    setting.runner.run()
    setting.scheduler.reset_prefix_cache(preempt=False)
    setting.clock.now = 100.0
    setting.load("tried again")


@pytest.mark.parametrize("received", [0, 4])
def test_blocks_that_are_gone_are_computed(setting: Setting, received: int) -> None:
    serial = setting.load()
    setting.receive(serial, received)
    setting.loads.failed(serial)
    setting.scheduler.end_loads()
    assert hits(setting.scheduler, setting.runner) == (0, received * BLOCK)


def test_an_aborted_request_holds_nothing(setting: Setting) -> None:
    serial = setting.load()
    assert setting.scheduler.pool.num_used == 10
    setting.scheduler.abort("again")
    assert setting.tier.cancelled == [serial]
    assert setting.loads.block(serial, 0) is None
    assert setting.scheduler.pool.num_used == 0
    setting.scheduler.check()


def test_a_reset_forgets_what_is_being_loaded(setting: Setting) -> None:
    serial = setting.load()
    setting.receive(serial, 3)
    setting.scheduler.reset_prefix_cache(preempt=False)
    setting.scheduler.check()
    assert hits(setting.scheduler, setting.runner) == (0, 0)


def test_a_request_that_finds_no_room_for_a_load_is_computed_later() -> None:
    setting = Setting(blocks=16)
    setting.scheduler.add(request("long", range(200, 230), 10))
    setting.runner.step()
    setting.scheduler.add(request("again", PROMPT, 1))
    setting.runner.run()
    assert not setting.tier.loads or setting.loads.take_ended() == []
    setting.clock.now = 10.0
    setting.scheduler.end_loads()
    setting.runner.run()
    assert {"long", "again"} <= setting.runner.ended.keys()


def test_blocks_that_leave_memory_are_saved_first(setting: Setting) -> None:
    setting.scheduler.add(request("new", range(300, 341), 1))
    setting.runner.run()
    assert len(setting.unsaved) == 10
    setting.scheduler.add(request("filling", range(400, 463), 1))
    setting.scheduler.add(request("memory", range(500, 563), 1))
    setting.scheduler.add(request("up", range(600, 663), 1))
    setting.scheduler.add(request("wholly", range(700, 763), 1))
    setting.runner.run()
    leaving = setting.unsaved.take_leaving()
    assert leaving
    assert all(key not in setting.tier.keys for _, key in leaving)
    assert setting.unsaved.take_leaving() == []


def test_blocks_that_may_hold_nan_leave_the_tier(setting: Setting) -> None:
    serial = setting.load()
    setting.receive(serial, 10)
    plan = setting.scheduler.schedule()
    setting.scheduler.update(plan, StepResult(errors={"again": NOT_FINITE}))
    assert not setting.tier.keys
    plan = setting.scheduler.schedule()  # it is computed again, wholly
    assert plan.scheduled[0].start == 0


def test_what_is_found_in_memory_is_kept_longer(setting: Setting) -> None:
    serial = setting.load()
    setting.receive(serial, 10)
    setting.runner.run()
    for name in ("first", "second"):
        setting.scheduler.add(request(name, PROMPT, 1))
        setting.runner.run()
    assert len(setting.tier.touched) == 10  # once a minute
    assert setting.tier.touched[-1] == setting.tier.loads[serial][0]


def test_host_memory_and_disk_have_speeds_of_their_own() -> None:
    """A disk that is slower than computing does not keep blocks from coming back from memory."""
    clock = Clock()
    rule = LoadRule(1, clock)
    rule.computed(1000, 1.0)
    rule.loaded(10, 1.0, "disk")
    assert not rule.loads(10, 100, "disk")
    assert rule.loads(10, 100, "host")
    rule.loaded(1000, 1.0, "host")
    assert rule.loads(10, 100, "host")
    rule.given_up(1, 1.0, "host")
    assert not rule.loads(10, 100, "host")
    clock.now = 61.0
    assert rule.loads(10, 100, "disk")
