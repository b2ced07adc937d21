"""Blocks that a prefiller keeps for decoders: how long, how many, and what they give way to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.engine.client.kv_transfer import RemoteBlocks
from quire.engine.scheduling.block_tables import BlockGroups
from quire.engine.scheduling.blocks import BlockPool
from quire.engine.scheduling.held_blocks import EngineAddress, HeldBlocks, HoldLimits
from quire.engine.scheduling.scheduler import Scheduler
from tests.support.scheduling import BLOCK, FakeRunner, make, request


class Clock:
    """Seconds that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Setting:
    """A scheduler that keeps blocks for 10 seconds."""

    def __init__(self, blocks: int = 64, share: float = 0.5, groups: BlockGroups | None = None) -> None:
        self.clock = Clock()
        address = EngineAddress("engine", "10.0.0.5", 14579)

        def held_in(pool: BlockPool) -> HeldBlocks:
            return HeldBlocks(pool, address, HoldLimits(share, 10.0), self.clock)

        self.scheduler: Scheduler = make(blocks, groups=groups or BlockGroups(kept_blocks=1), held_in=held_in)
        held = self.scheduler.held
        assert held is not None
        self.held = held
        self.runner = FakeRunner(self.scheduler)

    def prefill(self, name: str, start: int, length: int = 16, *, flow: str = "") -> RemoteBlocks | None:
        """Compute a prompt whose blocks are kept."""
        self.scheduler.add(request(name, range(start, start + length), 1, is_held=True, flow=flow))
        self.runner.run()
        return self.runner.kept[name]


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_the_whole_blocks_of_a_prompt_are_kept(setting: Setting) -> None:
    kept = setting.prefill("a", 0, 18)
    assert kept is not None
    assert (kept.host, kept.port, kept.request_id, kept.num_tokens) == ("10.0.0.5", 14579, "a", 18)
    assert len(kept.block_ids) == setting.scheduler.pool.num_used == 4
    assert setting.scheduler.stats().held_blocks == 4
    setting.held.end("a")
    setting.held.end("a")  # a decoder may say so twice
    setting.scheduler.check()
    assert setting.scheduler.pool.num_used == 0
    assert setting.held.take_expired() == 0


def test_a_prompt_shorter_than_a_block_needs_nothing_to_be_kept(setting: Setting) -> None:
    kept = setting.prefill("a", 0, 3)
    assert kept is not None
    assert (kept.block_ids, len(setting.held)) == ([], 0)


def test_requests_that_ask_for_nothing_keep_nothing(setting: Setting) -> None:
    setting.scheduler.add(request("a", range(16), 1))
    setting.runner.run()
    assert setting.runner.kept == {"a": None}
    assert setting.scheduler.pool.num_used == 0


def test_blocks_that_nobody_reads_expire(setting: Setting) -> None:
    setting.prefill("a", 0)
    setting.clock.now = 5.0
    setting.prefill("b", 100)
    assert setting.held.next_expiry == 10.0
    setting.clock.now = 10.0
    setting.held.expire()
    assert setting.held.next_expiry == 15.0
    assert setting.held.take_expired() == 1
    assert setting.scheduler.pool.num_used == 4


def test_the_share_of_each_flow_is_fair() -> None:
    setting = Setting(blocks=32)  # of which 16 are kept
    setting.prefill("quiet", 0, flow="quiet")
    for index in range(6):
        setting.prefill(f"greedy {index}", 100 * (index + 1), flow="greedy")
        setting.scheduler.check()
    assert setting.held.num_blocks == 16
    assert setting.held.take_expired() == 3
    assert [setting.held.find("quiet", key) is None for key in setting.held._holds["quiet"].blocks] == [False] * 4
    assert setting.prefill("too long", 1000, 20) is not None
    assert Setting(blocks=16, share=0.2).prefill("too long", 0) is None


def test_blocks_give_way_if_nothing_else_can_run() -> None:
    setting = Setting(blocks=16, share=0.9)
    setting.prefill("a", 0, 28)
    setting.prefill("b", 100, 24)
    assert setting.held.num_blocks == 13
    setting.scheduler.add(request("waits", range(200, 240), 4))  # on entry
    setting.runner.run()
    setting.prefill("c", 300, 24)
    setting.scheduler.add(request("grows", range(400, 410), 50))  # while it runs
    setting.runner.run()
    assert setting.runner.ended["waits"] == setting.runner.ended["grows"] == "length"
    assert setting.held.take_expired() >= 2


def test_a_reset_of_the_prefix_cache_gives_all_back(setting: Setting) -> None:
    setting.prefill("a", 0)
    setting.scheduler.reset_prefix_cache(preempt=False)
    setting.scheduler.check()
    assert (len(setting.held), setting.scheduler.pool.num_used, setting.held.take_expired()) == (0, 0, 1)


def test_a_request_that_has_left_the_prefix_cache_is_not_kept() -> None:
    """Nobody knows its keys."""
    setting = Setting()
    setting.scheduler.limits = replace(setting.scheduler.limits, max_num_batched_tokens=8)
    setting.scheduler.add(request("a", range(16), 1, is_held=True))
    setting.runner.step()
    setting.scheduler.reset_prefix_cache(preempt=False)
    setting.runner.run()
    assert setting.runner.kept == {"a": None}


@pytest.mark.parametrize("tokens", [64, 9])
@pytest.mark.parametrize("length", [17, 18, 19, 20, 21, 40])
def test_a_decoder_finds_what_its_first_tokens_attend_to(tokens: int, length: int) -> None:
    """Chunks may be shorter than a block; the decoder begins at the start of the last block."""
    window = 6
    setting = Setting(groups=BlockGroups((window,), kept_blocks=1))
    setting.scheduler.limits = replace(setting.scheduler.limits, max_num_batched_tokens=tokens)
    kept = setting.prefill("a", 0, length)
    assert kept is not None
    start = (length - 1) // BLOCK * BLOCK  # where the decoder begins
    first_seen = max(0, start - window + 1) // BLOCK
    assert length // BLOCK - len(kept.block_ids) <= first_seen
