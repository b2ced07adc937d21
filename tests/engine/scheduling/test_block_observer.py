"""BlockObserver: what is told of the blocks of the prefix cache, and when."""

from __future__ import annotations

import hashlib
import struct
from array import array

import pytest
from typing_extensions import override

from quire.engine.scheduling.block_observer import BlockObserver, StoredBlock
from quire.engine.scheduling.block_tables import BlockGroups
from quire.engine.scheduling.plan import NOT_FINITE, SampledTokens, SequenceError, StepResult
from quire.engine.scheduling.request import BlockHash, Request
from quire.engine.scheduling.scheduler import Scheduler
from tests.support.scheduling import BLOCK, FakeRunner, make, request

FAILED = SequenceError("the device failed")


class Notes(BlockObserver):
    """Keep what was told."""

    def __init__(self) -> None:
        self.all: list[StoredBlock] = []
        self.present: dict[tuple[BlockHash, int], StoredBlock] = {}
        self.clearings = 0

    @override
    def stored(self, block: StoredBlock) -> None:
        assert (block.key, block.group) not in self.present
        self.present[block.key, block.group] = block
        self.all.append(block)

    @override
    def removed(self, block: int, key: BlockHash, group: int) -> None:
        assert self.present.pop((key, group)).block == block

    @override
    def cleared(self) -> None:
        self.present.clear()
        self.clearings += 1


def observed(**limits: int) -> tuple[Scheduler, Notes]:
    notes = Notes()
    return make(observers=[notes], **limits), notes  # type: ignore[arg-type]


def first_hash(scheduler: Scheduler, prompt: range, salt: str | None = None) -> BlockHash:
    """The hash of the first block of a prompt."""
    scheduler.add(request("probe", prompt, cache_salt=salt))
    probe: Request = scheduler._requests["probe"]
    scheduler.abort("probe")
    hasher = scheduler._hasher
    assert hasher is not None
    return probe.block_hashes(BLOCK, hasher)[0]


def test_a_block_is_stored_when_its_step_has_ended() -> None:
    scheduler, notes = observed()
    scheduler.add(request("r", range(10)))
    plan = scheduler.schedule()
    assert not notes.all
    scheduler.update(plan, StepResult([SampledTokens("r", [10])]))
    assert [block.tokens.tolist() for block in notes.all] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [block.parent for block in notes.all] == [None, notes.all[0].key]
    assert [(block.group, block.extra_keys) for block in notes.all] == [(0, ())] * 2


def test_of_several_steps_in_flight_each_stores_its_own_blocks() -> None:
    scheduler, notes = observed(tokens=8, stages=3)
    scheduler.add(request("long", range(20)))
    plans = [scheduler.schedule() for _ in range(3)]
    for plan, count in zip(plans, (2, 4, 5), strict=True):
        scheduler.update(plan, StepResult())
        assert len(notes.all) == count


def test_generated_tokens_are_in_blocks_as_well() -> None:
    scheduler, notes = observed()
    runner = FakeRunner(scheduler)
    scheduler.add(request("r", range(6), 8))
    runner.run()
    assert [block.tokens for block in notes.all] == [
        array("i", runner.tokens["r"][:12][start : start + 4]) for start in (0, 4, 8)
    ]


def test_blocks_are_removed_when_others_take_their_place() -> None:
    scheduler, notes = observed(blocks=4, length=16)
    runner = FakeRunner(scheduler)
    for name, first in (("a", 0), ("b", 50)):
        scheduler.add(request(name, range(first, first + 12), 1))
        runner.run()
    assert {tuple(block.tokens) for block in notes.present.values()} >= {(50, 51, 52, 53), (54, 55, 56, 57)}
    assert len(notes.all) == 6
    assert len(notes.present) <= 4


def test_a_block_of_a_step_that_fails_is_never_stored() -> None:
    scheduler, notes = observed()
    scheduler.add(request("bad", range(10)))
    scheduler.add(request("good", range(20, 30)))
    scheduler.update(scheduler.schedule(), StepResult(errors={"bad": FAILED}))
    assert [block.tokens[0] for block in notes.all] == [20, 24]


@pytest.mark.parametrize("error", [FAILED, NOT_FINITE])
def test_nobody_finds_blocks_of_a_failed_step_of_an_aborted_request(error: SequenceError) -> None:
    """The step may not have written them, and who has them would never know."""
    scheduler, notes = observed()
    scheduler.add(request("gone", range(10)))
    plan = scheduler.schedule()
    scheduler.abort("gone")
    scheduler.update(plan, StepResult(errors={"gone": error}))
    scheduler.add(request("next", range(10)))
    assert scheduler.schedule().scheduled[0].start == 0
    assert not notes.all


def test_a_block_that_is_registered_again_is_stored_by_its_second_step() -> None:
    """A step in flight of a request that is computed again does not count."""
    scheduler, notes = observed(tokens=8, stages=3)
    scheduler.add(request("first", range(8), 1))
    scheduler.update(scheduler.schedule(), StepResult([SampledTokens("first", [1])]))
    stored = len(notes.all)
    scheduler.add(request("again", range(20)))
    plans = [scheduler.schedule(), scheduler.schedule()]  # 8 cached tokens, then 8, then the others
    scheduler.update(plans[0], StepResult(errors={"again": NOT_FINITE}))
    assert not notes.present
    plans.append(scheduler.schedule())
    scheduler.update(plans[1], StepResult())
    assert len(notes.all) == stored
    scheduler.check()


def test_a_reset_clears_and_later_blocks_of_those_in_the_batch_are_not_told() -> None:
    """Nobody else can find them."""
    scheduler, notes = observed()
    runner = FakeRunner(scheduler)
    scheduler.add(request("r", range(8), 12))
    runner.step()
    scheduler.reset_prefix_cache(preempt=False)
    assert notes.clearings == 1
    before = len(notes.all)
    runner.run()
    assert len(notes.all) == before
    scheduler.add(request("next", range(8), 1))
    runner.run()
    assert len(notes.present) == 2


def test_the_blocks_of_all_groups_are_told() -> None:
    notes = Notes()
    scheduler = make(observers=[notes], groups=BlockGroups((None, 6)))
    runner = FakeRunner(scheduler)
    scheduler.add(request("r", range(24), 1))
    runner.run()
    assert sorted(block.group for block in notes.all) == [0] * 6 + [1] * 6
    assert len({block.key for block in notes.all}) == 6


def test_the_salt_is_a_key_of_the_first_block() -> None:
    scheduler, notes = observed()
    scheduler.add(request("r", range(8), 1, cache_salt="secret"))
    FakeRunner(scheduler).run()
    assert [block.extra_keys for block in notes.all] == [("secret",), ()]


@pytest.mark.parametrize("salt", [None, "salt"])
def test_hashes_are_the_same_in_every_process(salt: str | None) -> None:
    """Replicas and later starts find each other's blocks: a hash depends on content alone, without a seed."""
    root = hashlib.sha256((salt or "").encode()).digest()
    content = struct.pack("<4i", *range(4))
    assert first_hash(make(), range(8), salt) == hashlib.sha256(root + content).digest()
