"""EventRecorder: which events it makes of what happens to blocks, and BatchEncoder: how they are written."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from quire.engine.client.protocol import LoadSource
from quire.engine.kv_events.messages import AllBlocksCleared, BatchEncoder, EventBatch, external_hash
from quire.engine.kv_events.recorder import LARGEST_BATCH, EventRecorder
from quire.engine.scheduling.block_observer import StoredBlock
from tests.support.kv_events import decode_batch

NOW = 1_789_095_808.83
KEYS = [bytes([number]) * 32 for number in range(8)]


def block(number: int, parent: int | None, *extra: Any, group: int = 0, size: int = 4) -> StoredBlock:
    tokens = array("i", range(number * size, (number + 1) * size))
    return StoredBlock(number, KEYS[number], None if parent is None else KEYS[parent], tokens, group, extra)


class Recorded:
    """A recorder, and the events of its batches after the first."""

    def __init__(self) -> None:
        self.batches: list[EventBatch] = []
        groups = [("full_attention", None), ("sliding_window", 8)]
        self.recorder = EventRecorder(lambda batch, _: self.batches.append(batch), groups, clock=lambda: NOW)
        assert [type(event) for event in self.batches.pop().events] == [AllBlocksCleared]

    def events(self, encoding: Any = "map") -> list[list[Any]]:
        """The events of each batch, as they are written."""
        return [msgspec.msgpack.decode(BatchEncoder(encoding).encode(batch))[1] for batch in self.batches]


def test_blocks_that_follow_each_other_are_one_event_with_vllms_names() -> None:
    recorded = Recorded()
    recorded.recorder.stored(block(0, None, "salt"))
    recorded.recorder.stored(block(1, 0, ("aa" * 32, -2), ("bb" * 32, 1)))
    recorded.recorder.step_ended()
    assert recorded.events() == [
        [
            {
                "type": "BlockStored",
                "block_hashes": [external_hash(KEYS[0]), external_hash(KEYS[1])],
                "parent_block_hash": None,
                "token_ids": list(range(8)),
                "block_size": 4,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [["salt"], [["aa" * 32, -2], ["bb" * 32, 1]]],
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        ]
    ]


def test_the_array_has_the_fields_in_vllms_order() -> None:
    recorded = Recorded()
    recorded.recorder.stored(block(1, 0, group=1))
    recorded.recorder.removed(5, KEYS[5], 1)
    recorded.recorder.cleared()
    recorded.recorder.step_ended()
    stored = [[external_hash(KEYS[1])], external_hash(KEYS[0]), [4, 5, 6, 7], 4, None, "GPU", None, [None], 1]
    assert recorded.events("array") == [
        [
            ["BlockStored", *stored, "sliding_window", 8],
            ["BlockRemoved", [external_hash(KEYS[5])], "GPU", 1],
            ["AllBlocksCleared"],
        ]
    ]


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_a_batch_is_an_array_of_time_events_and_rank(encoding: Any) -> None:
    payload = BatchEncoder(encoding).encode(EventBatch(NOW, [AllBlocksCleared()], 3))
    assert decode_batch(payload) == (NOW, [{"type": "AllBlocksCleared"}], 3)
    assert isinstance(msgspec.msgpack.decode(payload), list)


def test_what_is_stored_after_a_removal_is_another_event() -> None:
    """It may be the block that was removed."""
    recorded = Recorded()
    recorder = recorded.recorder
    recorder.stored(block(0, None))
    recorder.removed(1, KEYS[1], 0)
    recorder.removed(2, KEYS[2], 0)
    recorder.removed(2, KEYS[2], 1)
    recorder.stored(block(1, 0))
    recorder.step_ended()
    (events,) = recorded.events()
    assert [(event["type"], len(event["block_hashes"])) for event in events] == [
        ("BlockStored", 1),
        ("BlockRemoved", 2),
        ("BlockRemoved", 1),
        ("BlockStored", 1),
    ]


def test_blocks_of_another_sequence_or_group_are_another_event() -> None:
    recorded = Recorded()
    for stored in (block(0, None), block(0, None, group=1), block(1, 0), block(1, 0, group=1), block(3, 2)):
        recorded.recorder.stored(stored)
    recorded.recorder.step_ended()
    (events,) = recorded.events()
    assert [(event["group_idx"], len(event["block_hashes"])) for event in events] == [(0, 2), (1, 2), (0, 1)]


def test_a_long_prompt_is_several_messages_of_a_bounded_size() -> None:
    """A subscriber's queue is a number of messages."""
    recorded = Recorded()
    for number in range(2000):
        key, parent = number.to_bytes(32), None if number == 0 else (number - 1).to_bytes(32)
        recorded.recorder.stored(StoredBlock(number, key, parent, array("i", range(100_000, 100_016))))
    recorded.recorder.step_ended()
    payloads = [BatchEncoder("map").encode(batch) for batch in recorded.batches]
    assert len(payloads) > 10
    assert max(map(len, payloads)) < LARGEST_BATCH + 1024
    events = [event for payload in payloads for event in decode_batch(payload)[1]]
    assert sum(len(event["block_hashes"]) for event in events) == 2000
    assert all(event["parent_block_hash"] is not None for event in events[1:])


def test_a_step_without_events_sends_nothing() -> None:
    recorded = Recorded()
    recorded.recorder.step_ended()
    assert recorded.batches == []


@pytest.mark.parametrize(
    ("encoding", "source", "medium"), [("map", "disk", "STORAGE"), ("array", "disk", "STORAGE"), ("map", "host", "CPU")]
)
def test_blocks_of_another_tier_have_its_medium_and_no_tokens(encoding: str, source: LoadSource, medium: str) -> None:
    recorded = Recorded()
    recorded.recorder.tier_changed(source, [KEYS[0], KEYS[1], KEYS[0] + b"\1"], [])
    recorded.recorder.tier_changed(source, [], [KEYS[1], KEYS[0] + b"\1"])
    recorded.recorder.tier_changed(source, [], [])
    stored, removed = (
        decode_batch(BatchEncoder(encoding).encode(batch))[1]  # type: ignore[arg-type]
        for batch in recorded.batches
    )
    first, second = external_hash(KEYS[0]), external_hash(KEYS[1])
    assert [(event["type"], event["block_hashes"], event["group_idx"]) for event in [*stored, *removed]] == [
        ("BlockStored", [first, second], 0),
        ("BlockStored", [first], 1),
        ("BlockRemoved", [second], 0),
        ("BlockRemoved", [first], 1),
    ]
    assert {event["medium"] for event in [*stored, *removed]} == {medium}
    assert [(event["token_ids"], event["block_size"]) for event in stored] == [([], 0)] * 2
    assert [event["kv_cache_spec_kind"] for event in stored] == ["full_attention", "sliding_window"]
