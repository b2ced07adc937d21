"""Block tables by group: what a sequence holds, how many sequences fit, and which prefixes are found."""

from __future__ import annotations

import pytest

from quire.engine.client.protocol import ErrorOutput
from quire.engine.scheduling.block_tables import BlockGroups
from quire.engine.scheduling.plan import NOT_FINITE, StepResult
from tests.support.scheduling import BLOCK, FakeRunner, make, request


def held(runner: FakeRunner) -> int:
    return runner.scheduler.pool.num_used


@pytest.mark.parametrize(("windows", "expected"), [((None,), 16), ((None, 8, 8), 16 + 2 * 3), ((8,), 3)])
def test_windows_hold_only_blocks_in_sight(windows: tuple[int | None, ...], expected: int) -> None:
    scheduler = make(128, tokens=8, groups=BlockGroups(windows))
    runner = FakeRunner(scheduler)
    scheduler.add(request("long", range(40), 24))
    most = 0
    while scheduler.has_work:
        runner.step()
        most = max(most, held(runner))
    chunk = 8 // BLOCK  # of the prompt, while it is computed
    assert most <= expected + chunk * sum(window is not None for window in windows)
    assert most <= scheduler._tables._groups.most_blocks(64, 8, BLOCK)


@pytest.mark.parametrize("windows", [(None, 8, 8), (8,)])
def test_more_sequences_fit_where_windows_free_blocks(windows: tuple[int | None, ...]) -> None:
    """Without windows each of them takes 16 blocks of a group at the end."""

    def preemptions(groups: BlockGroups) -> int:
        scheduler = make(24 * len(windows) + 20, seqs=3, tokens=16, groups=groups)
        runner = FakeRunner(scheduler)
        for index in range(3):
            scheduler.add(request(f"r{index}", [index] * 20, 40))
        total = 0
        while scheduler.has_work:
            total += runner.step().stats.preemptions
        return total

    assert preemptions(BlockGroups(windows)) == 0
    assert preemptions(BlockGroups((None,) * len(windows))) > 0


def test_a_model_without_pages_uses_a_block_for_each_sequence() -> None:
    """Of none of which it has memory: they are its slots, whose use operators see."""
    scheduler = make(8, groups=BlockGroups((), has_states=True))
    runner = FakeRunner(scheduler)
    for name in "ab":
        scheduler.add(request(name, range(30), 4))
    runner.step()
    stats = scheduler.stats()
    assert (held(runner), stats.blocks_used, stats.blocks_total) == (0, 2, 8)
    runner.run()
    assert scheduler.stats().blocks_used == 0


def found(runner: FakeRunner, prompt: list[int]) -> int:
    """Tokens of a prompt that are found in the prefix cache."""
    name = f"r{len(runner.ended)}"
    runner.scheduler.add(request(name, prompt, 1))
    plan = runner.step()
    runner.run()
    return plan.stats.prefix_hits


def test_a_prefix_is_found_if_windows_have_their_last_tokens() -> None:
    """Blocks before the window were given back, and may be evicted."""
    runner = FakeRunner(make(64, tokens=8, groups=BlockGroups((None, 8))))
    prompt = list(range(41))
    assert found(runner, prompt) == 0
    pool, tables = runner.scheduler.pool, runner.scheduler._tables
    assert found(runner, prompt) == 40
    message = request("look", prompt, 1)
    runner.scheduler.add(message)
    prefix = tables.match(runner.scheduler._requests["look"])
    runner.scheduler.abort("look")
    assert (prefix.count, prefix.unseen, len(prefix.held)) == (10, [0, 8], 12)
    pool.evict_blocks([prefix.tables[1][9]])  # the last one in sight
    assert found(runner, prompt) == 36
    assert found(runner, prompt[:17]) == 16


@pytest.mark.parametrize("missing", [0, 5, 9])
def test_a_prefix_ends_where_a_group_without_window_lacks_a_block(missing: int) -> None:
    runner = FakeRunner(make(64, tokens=64, groups=BlockGroups((6, None, None))))
    prompt = list(range(41))
    found(runner, prompt)
    runner.scheduler.add(request("look", prompt, 1))
    prefix = runner.scheduler._tables.match(runner.scheduler._requests["look"])
    runner.scheduler.abort("look")
    runner.scheduler.pool.evict_blocks([prefix.tables[2][missing]])
    assert found(runner, prompt) == missing * BLOCK


@pytest.mark.parametrize("windows", [(None, 6), (6,)])
def test_blocks_that_were_given_back_before_a_failure_are_not_found(windows: tuple[int | None, ...]) -> None:
    """NaN of the first chunk of a prompt is noticed when its last token is sampled."""
    prompt = list(range(40))
    for end in range(4, 40, 4):
        scheduler = make(64, tokens=8, groups=BlockGroups(windows))
        scheduler.add(request("bad", prompt, 4))
        plans = [scheduler.schedule() for _ in range(5)]
        for plan in plans[:-1]:
            scheduler.update(plan, StepResult())
        (output,) = scheduler.update(plans[-1], StepResult(errors={"bad": NOT_FINITE}))
        assert isinstance(output, ErrorOutput)
        assert scheduler.schedule().removed == ["bad"]
        assert found(FakeRunner(scheduler), prompt[: end + 1]) == 0


def test_a_prefix_is_not_read_where_there_are_states() -> None:
    runner = FakeRunner(make(64, groups=BlockGroups((None,), has_states=True)))
    prompt = list(range(20))
    assert [found(runner, prompt) for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("windows", [(None,), (None, 5), (3, 7), ()])
def test_the_longest_sequence_is_the_longest_that_fits(windows: tuple[int | None, ...]) -> None:
    groups = BlockGroups(windows)
    for blocks in range(1, 30):
        fits = [length for length in range(61) if groups.most_blocks(length, 8, BLOCK) <= blocks]
        assert groups.longest(blocks, 60, 8, BLOCK) == max(fits, default=0)
