"""KVEventPublisher: its sockets, what it keeps for subscribers that have missed something, and its bounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from quire.config.kv_events import KVEventsConfig
from quire.engine.kv_events.endpoints import EndpointUnavailable, endpoint_of
from quire.engine.kv_events.messages import AllBlocksCleared, EventBatch
from quire.engine.kv_events.publisher import KVEventPublisher
from tests.support.kv_events import Subscriber, decode_batch

TOPIC = "kv@10.0.0.5:8000@model"


@contextmanager
def publishing(folder: Path, **settings: Any) -> Iterator[KVEventPublisher]:
    fields: dict[str, Any] = {
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
        "topic": TOPIC,
    }
    publisher = KVEventPublisher(KVEventsConfig(enable_kv_cache_events=True, **{**fields, **settings}))
    try:
        yield publisher
    finally:
        publisher.close()


def subscriber(publisher: KVEventPublisher, topic: bytes = b"kv@") -> Subscriber:
    return Subscriber(publisher.source.endpoint, publisher.source.replay_endpoint, topic)


def publish(publisher: KVEventPublisher, count: int = 1, nbytes: int = 10) -> None:
    for number in range(count):
        publisher.publish(EventBatch(float(number), [AllBlocksCleared()]), nbytes)


def test_a_message_has_topic_sequence_number_and_batch(tmp_path: Path) -> None:
    with publishing(tmp_path) as publisher, subscriber(publisher) as reader:
        reader.join(lambda: publish(publisher))
        topic, first, payload = reader.receive()
        publish(publisher)
        assert topic == TOPIC.encode()
        assert decode_batch(payload)[1] == [{"type": "AllBlocksCleared"}]
        assert reader.receive()[1] == first + 1


def test_those_who_subscribe_late_are_sent_what_was_before(tmp_path: Path) -> None:
    with publishing(tmp_path) as publisher, subscriber(publisher) as reader:
        publish(publisher, 300)  # more than wait for a subscriber that is sent them again
        reader.join(lambda: publish(publisher))
        last = reader.receive()[1]
        batches = reader.missed(0)
        assert [sequence for sequence, _ in batches][: last + 1] == list(range(last + 1))
        assert [decode_batch(payload)[0] for _, payload in batches[:300]] == list(map(float, range(300)))
        assert [sequence for sequence, _ in reader.missed(290)][:10] == list(range(290, 300))
        assert reader.missed(1 << 40) == []


@pytest.mark.parametrize("bound", [{"buffer_steps": 20}, {"buffer_bytes": 1 << 16}])
def test_the_last_batches_are_kept(tmp_path: Path, bound: dict[str, int]) -> None:
    with publishing(tmp_path, **bound) as publisher, subscriber(publisher) as reader:
        for _ in range(20):
            publish(publisher, 20)
            reader.missed(1 << 40)  # the queue is empty then
        sequences = [sequence for sequence, _ in reader.missed(0)]
        assert sequences == list(range(400 - len(sequences), 400))
        assert len(sequences) == 20 if "buffer_steps" in bound else 100 < len(sequences) < 200


@pytest.mark.parametrize("bound", [{"max_queue_size": 5}, {"buffer_bytes": 1 << 16}])
def test_what_cannot_wait_is_dropped_and_its_numbers_are_missing(
    tmp_path: Path, bound: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is never held up."""
    monkeypatch.setattr(KVEventPublisher, "_send_queued", lambda self: None)
    with publishing(tmp_path, **bound) as publisher, subscriber(publisher) as reader:
        publish(publisher, 20, nbytes=1 << 13)
        monkeypatch.undo()
        publish(publisher, 0)
        publisher._notify()
        publish(publisher, 0)
        held = reader.missed(0)
        while not held:
            held = reader.missed(0)
        assert [sequence for sequence, _ in held] == list(range(len(held)))
        assert 5 <= len(held) <= 7
        publish(publisher)
        while held[-1][0] != 20:
            held = reader.missed(0)


def test_a_subscriber_that_reads_nothing_holds_up_nobody(tmp_path: Path) -> None:
    with publishing(tmp_path, hwm=10) as publisher, subscriber(publisher) as idle, subscriber(publisher) as reader:
        idle.join(lambda: publish(publisher))
        reader.join(lambda: publish(publisher))
        publish(publisher, 5000)
        while not (batches := reader.missed(4999)):
            pass
        assert batches[0][0] == 4999


def test_a_malformed_request_is_ignored(tmp_path: Path) -> None:
    with publishing(tmp_path) as publisher, subscriber(publisher) as reader, zmq.Context() as context:
        publish(publisher)
        dealer = context.socket(zmq.DEALER)
        dealer.connect(publisher.source.replay_endpoint or "")
        for frames in ((b"",), (b"", b"12"), (b"", b"12345678", b"more"), (b"x", b"y", b"z")):
            dealer.send_multipart(frames)
        assert reader.missed(0)
        dealer.close(linger=0)


def test_an_endpoint_in_use_is_named(tmp_path: Path) -> None:
    with (
        publishing(tmp_path, replay_endpoint="tcp://127.0.0.1:0") as publisher,
        pytest.raises(EndpointUnavailable, match=r"--kv-events-config: tcp://127\.0\.0\.1:\d+ is not available"),
        publishing(tmp_path, replay_endpoint=publisher.source.replay_endpoint),
    ):
        pass


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("tcp://*:0", 3, "tcp://*:0"),
        ("ipc:///run/events", 2, "ipc:///run/events_dp2"),
    ],
)
def test_each_replica_has_its_endpoint(endpoint: str, rank: int, expected: str) -> None:
    assert endpoint_of(endpoint, rank) == expected
