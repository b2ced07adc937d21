"""A subscriber that rebuilds the index of a server from its KV events has, after every step, what the pool has."""

from __future__ import annotations

import tempfile
from typing import Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.config.kv_events import KVEventsConfig
from quire.engine.client.protocol import AudioItem
from quire.engine.kv_events.messages import EventBatch, external_hash
from quire.engine.kv_events.publisher import KVEventPublisher
from quire.engine.kv_events.recorder import EventRecorder
from quire.engine.scheduling.block_tables import BlockGroups
from quire.engine.scheduling.blocks import BlockPool, hasher_named
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.plan import NOT_FINITE, SequenceError
from quire.engine.scheduling.scheduler import Scheduler
from tests.support.kv_events import Follower, Subscriber
from tests.support.scheduling import BLOCK, FakeRunner, request

LENGTH = 40
HASH_BYTES = 32
PREFIXES = (range(20), range(100, 130), [7] * 30)
ERRORS = (SequenceError("the device failed"), NOT_FINITE)
Encoding = Literal["map", "array"]


class EventMachine(RuleBasedStateMachine):
    """Random requests of a scheduler whose blocks are few, and a subscriber that loses messages."""

    encoding: Encoding = "map"

    @initialize(
        window=st.sampled_from([None, 6]),
        stages=st.integers(1, 3),
        rope_switch=st.sampled_from([None, 24]),
        draft=st.sampled_from([0, 2]),
    )
    def start(self, window: int | None, stages: int, rope_switch: int | None, draft: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        endpoint, replay = f"ipc://{self.folder.name}/events", f"ipc://{self.folder.name}/replay"
        config = KVEventsConfig(
            enable_kv_cache_events=True, endpoint=endpoint, replay_endpoint=replay, encoding=self.encoding
        )
        self.publisher = KVEventPublisher(config)
        kinds = [("full_attention", None)] + ([] if window is None else [("sliding_window", window)])
        self.recorder = EventRecorder(self.publisher.publish, kinds)
        limits = SchedulerLimits(
            max_num_seqs=6,
            max_num_batched_tokens=24,
            max_model_len=LENGTH,
            max_draft=draft,
            rope_switch=rope_switch,
            stages=stages,
            encoder_compute_budget=32,
            encoder_cache_size=32,
            lora_digests={0: b"digest"},
            item_lora_id=0,
        )
        self.pool = BlockPool(32, BLOCK, observers=[self.recorder])
        groups = BlockGroups((None,) if window is None else (None, window))
        self.scheduler = Scheduler(limits, self.pool, groups, hasher=hasher_named("sha256"))
        self.runner = FakeRunner(self.scheduler)
        self.subscriber = Subscriber(endpoint, replay)
        self.subscriber.join(lambda: self.publisher.publish(EventBatch(0.0, []), 0))
        self.follower = Follower(self.subscriber.missed)
        self.requests = 0
        self.lost = 0

    def teardown(self) -> None:
        self.publisher.close()
        self.subscriber.__exit__(None, None, None)
        self.folder.cleanup()

    @rule(
        prefix=st.sampled_from(PREFIXES),
        length=st.integers(1, LENGTH - 2),
        salt=st.sampled_from([None, None, "a", "b"]),
        max_tokens=st.integers(1, 8),
        media=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6), st.sampled_from([b"x", b"y"])), max_size=2),
    )
    def add(
        self, prefix: range, length: int, salt: str | None, max_tokens: int, media: list[tuple[int, int, bytes]]
    ) -> None:
        prompt = [*prefix, *range(self.requests, self.requests + LENGTH)][:length]
        items, end = [], 0
        for start, count, digest in sorted(media):
            if end <= start and start + count <= length:
                features = np.zeros((1, 4), np.float32)
                items.append(AudioItem(hash=digest, start=start, length=count, features=features))
                end = start + count
        added = request(str(self.requests), prompt, max_tokens, cache_salt=salt, items=tuple(items))
        self.scheduler.add(added)
        self.requests += 1

    @precondition(lambda self: self.scheduler._requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scheduler.abort(data.draw(st.sampled_from(sorted(self.scheduler._requests))))

    @precondition(lambda self: self.scheduler._requests)
    @rule(data=st.data(), error=st.sampled_from(ERRORS))
    def fail(self, data: st.DataObject, error: SequenceError) -> None:
        self.runner.failing[data.draw(st.sampled_from(sorted(self.scheduler._requests)))] = error

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.scheduler.has_work or self.runner.in_flight:
                self.runner.step()

    @rule(preempt=st.booleans())
    def reset(self, preempt: bool) -> None:
        while self.runner.in_flight:
            self.runner.finish()
        self.scheduler.reset_prefix_cache(preempt=preempt)

    @rule(count=st.integers(1, 3))
    def lose(self, count: int) -> None:
        self.lost += count

    @invariant()
    def the_index_is_that_of_the_pool(self) -> None:
        self.scheduler.check()
        self.recorder.step_ended()  # blocks that were removed for a step in flight would be told with those it stores
        published = self.publisher._sequence
        while self.follower.next < published:
            _, sequence, payload = self.subscriber.receive()
            if self.lost and sequence + 1 < published:  # a loss is noticed when another message arrives
                self.lost -= 1
            else:
                self.follower.take(sequence, payload)
        index = self.follower.index
        assert index.present.keys() == {
            (external_hash(key[:HASH_BYTES]), key[HASH_BYTES] if len(key) > HASH_BYTES else 0)
            for key, block in self.pool._by_hash.items()
            if block in self.pool._stored
        }
        for key, block in self.pool._by_hash.items():
            if block in self.pool._stored:
                group = key[HASH_BYTES] if len(key) > HASH_BYTES else 0
                indexed = index.present[external_hash(key[:HASH_BYTES]), group]
                written = self.runner.written[block][1]
                assert indexed.tokens == written[-len(indexed.tokens) :]
                assert indexed.orphan is not None or len(indexed.tokens) == len(written)
        contents = [block for block in index.known.values() if block.orphan is None]
        assert len({*contents}) == len(contents), "events do not tell two blocks apart"
        running = {id(filled.request): filled for filled in self.pool._filling.values()}
        assert self.runner.in_flight or not running, "a computed block is not stored"


class ArrayMachine(EventMachine):
    encoding = "array"


class ManyMapsMachine(EventMachine):
    """More than 10,000 requests."""


class ManyArraysMachine(ArrayMachine):
    """As many."""


# The steps are the test itself: a busy machine is no reason to fail because they take long.
_SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestMaps = EventMachine.TestCase
TestMaps.settings = settings(_SETTINGS, max_examples=10, stateful_step_count=30)
TestArrays = ArrayMachine.TestCase
TestArrays.settings = settings(_SETTINGS, max_examples=5, stateful_step_count=30)
_MANY = settings(_SETTINGS, max_examples=1300, stateful_step_count=60)
TestManyMaps = pytest.mark.slow(pytest.mark.timeout(1200)(ManyMapsMachine.TestCase))
TestManyMaps.settings = _MANY
TestManyArrays = pytest.mark.slow(pytest.mark.timeout(1200)(ManyArraysMachine.TestCase))
TestManyArrays.settings = _MANY
