"""Snapshots of states: which go first, where they are taken, and why tokens are computed again."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from quire.engine.scheduling.blocks import hasher_named
from quire.engine.scheduling.request import BlockHash
from quire.engine.scheduling.seen_prefixes import Chats, SeenPrefixes
from quire.engine.scheduling.snapshot_borders import choose_borders, message_ends
from quire.engine.scheduling.snapshot_index import SnapshotIndex

HASHER = hasher_named("xxhash")


def chain(name: str, blocks: int) -> list[BlockHash]:
    return [f"{name}{index}".encode() for index in range(blocks)]


def save(index: SnapshotIndex, hashes: list[BlockHash], owner: str = "") -> None:
    place = index.take_place()
    assert place is not None
    index.add(place, hashes, owner)
    index.check(())


def test_the_snapshot_goes_first_that_costs_least() -> None:
    index = SnapshotIndex(3, 16)
    for name, blocks in (("long", 9), ("short", 2), ("middle", 5)):
        save(index, chain(name, blocks))
    save(index, chain("new", 4))
    assert index.evicted == [chain("short", 2)[-1]]


def test_equal_snapshots_go_in_the_order_of_their_use() -> None:
    index = SnapshotIndex(2, 16)
    save(index, chain("a", 3))
    save(index, chain("b", 3))
    index.use(chain("a", 3)[-1])
    save(index, chain("c", 3))
    assert index.evicted == [chain("b", 3)[-1]]


def test_an_old_snapshot_goes_in_the_end_whatever_it_costs() -> None:
    index = SnapshotIndex(2, 16)
    save(index, chain("long", 20))
    for number in range(20):
        save(index, chain(f"short{number}-", 2))
    assert chain("long", 20)[-1] in index.evicted


def test_a_snapshot_costs_more_once_the_one_before_it_is_gone() -> None:
    index, hashes = SnapshotIndex(3, 16), chain("a", 8)
    save(index, hashes[:6])
    save(index, hashes)  # two blocks behind the other
    save(index, chain("b", 4))
    index.drop(hashes[5])
    save(index, chain("c", 9))
    save(index, chain("d", 9))
    assert index.evicted == [chain("b", 4)[-1]]
    assert [*index.counts(hashes)] == [8]


def test_only_the_last_snapshot_of_an_answer_is_kept_unless_it_is_used() -> None:
    index, hashes = SnapshotIndex(3, 16), chain("a", 3)
    save(index, hashes[:2], "request")
    index.replace(hashes[1], "another")
    assert hashes[1] in index
    index.use(hashes[1])
    index.replace(hashes[1], "request")
    assert hashes[1] in index, "another request has begun with it"
    save(index, hashes, "request")
    index.replace(hashes[2], "request")
    assert [*index.counts(hashes)] == [2]
    index.check(())


def test_borders_of_a_prompt() -> None:
    """Behind the last message rather than at the end, behind the first message, and at growing distances."""
    assert choose_borders(1000, 0, 16, [130, 990]) == [128, 512, 976]
    assert choose_borders(1000, 0, 16, []) == [512, 992]
    assert choose_borders(1000, 960, 16, []) == [992]
    assert choose_borders(1000, 976, 16, []) == []
    assert choose_borders(1000, 512, 16, [], (800,)) == [800, 992]
    assert choose_borders(20, 0, 16, []) == []


def test_messages_end_with_the_token_that_ends_answers() -> None:
    tokens = np.array([1, 2, 9, 3, 9, 9, 4], np.int32)
    assert message_ends(tokens, (9, 8)) == [3, 6]
    assert message_ends(tokens, ()) == []


def test_blocks_are_known_after_they_were_evicted() -> None:
    seen, hashes = SeenPrefixes(), chain("a", 5)
    seen.add(hashes[:3])
    assert (seen.longest(hashes), seen.had_snapshot(hashes)) == (3, False)
    seen.evicted([hashes[1]])
    assert seen.had_snapshot(hashes[1:])
    assert not seen.had_snapshot(hashes[2:])


def chat(*messages: list[int]) -> tuple[bytes, list[int]]:
    """The tokens of messages, and their ends."""
    tokens = [token for message in messages for token in message]
    return np.array(tokens, np.int32).tobytes(), np.cumsum([len(message) for message in messages]).tolist()


def test_a_changed_message_is_named_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    chats = Chats(HASHER, lambda: now[0])
    first = [[1, 9], [2, 9], [3, 4, 5, 9], [6, 9]]
    with caplog.at_level(logging.INFO):
        assert chats.compare(b"", *chat(*first)) == 0
        assert chats.compare(b"", *chat(*first, [7, 9], [8, 9])) == 0, "it goes on"
        assert chats.compare(b"", *chat(*first, [7, 9], [1, 9])) == 0, "only the last message is another"
        assert not caplog.records
        assert chats.compare(b"", *chat(*first[:2], [3, 9], [6, 9], [7, 9], [1, 9])) == 10
        assert "message 3 of a chat differs" in caplog.text
        assert chats.compare(b"", *chat(*first)) == 8
        assert chats.compare(b"salt", *chat(*first[:2], [3, 9], [6, 9])) == 0, "of another tenant"
        assert len(caplog.records) == 1
        now[0] = 61.0
        assert chats.compare(b"", *chat(*first[:2], [3, 9], [6, 9])) == 6
        assert len(caplog.records) == 2
