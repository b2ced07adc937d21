"""What the routers of llm-d and Dynamo find of a prompt, by their rules, is what the block pool has of it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest

from quire.engine.client.protocol import AudioItem
from quire.engine.kv_events.messages import BatchEncoder, EventBatch
from quire.engine.kv_events.recorder import EventRecorder
from quire.engine.scheduling.block_tables import BlockGroups
from quire.engine.scheduling.blocks import BlockPool, hasher_named
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.scheduler import Scheduler
from tests.support import dynamo, llmd
from tests.support.scheduling import BLOCK, FakeRunner, request

Encoding = Literal["map", "array"]
TOPIC = b"kv@10.0.0.5:8000@model"
DIGESTS = (b"x" * 32, b"y" * 32)
SALTS = (None, None, f"{dynamo.SALT_PREFIX}a", f"{dynamo.SALT_PREFIX}b")
PLACEHOLDER = 999  # the token of media, as it has in prompts
PREFIXES = (range(20), range(100, 130), [7] * 30)


@dataclass(frozen=True)
class Asked:
    """A prompt that was asked for: its blocks by the names of the engine, of llm-d and of Dynamo."""

    hashes: list[bytes]
    keys: list[int]
    path: dynamo.Path


class Followed:
    """A scheduler with few blocks, and the indexes of both routers."""

    def __init__(self, encoding: Encoding, windows: tuple[int | None, ...]) -> None:
        self.encoder = BatchEncoder(encoding)
        self.tree = dynamo.PrefixTree(BLOCK)
        self.indexer = llmd.Indexer(BLOCK)
        kinds = [("full_attention", None) if window is None else ("sliding_window", window) for window in windows]
        recorder = EventRecorder(self._publish, kinds)
        self.pool = BlockPool(40, BLOCK, observers=[recorder])
        limits = SchedulerLimits(
            max_num_seqs=6,
            max_num_batched_tokens=24,
            max_model_len=40,
            encoder_compute_budget=32,
            encoder_cache_size=32,
        )
        self.hasher = hasher_named("sha256")
        self.scheduler = Scheduler(limits, self.pool, BlockGroups(windows), hasher=self.hasher)
        self.full = windows.index(None)
        self.asked: list[Asked] = []

    def _publish(self, batch: EventBatch, _: int) -> None:
        payload = self.encoder.encode(batch)
        self.tree.take(payload)
        self.indexer.take(TOPIC, payload)

    def ask(self, choices: random.Random) -> None:
        """Add a request whose prompt begins as others do."""
        number = len(self.asked)
        tokens = [*choices.choice(PREFIXES), *range(number, number + 40)][: choices.randint(4, 38)]
        salt = choices.choice(SALTS)
        items: tuple[AudioItem, ...] = ()
        media: list[tuple[int, int, str]] = []
        if choices.random() < 0.4:
            start, digest = choices.randrange(min(20, len(tokens) - 3)), choices.choice(DIGESTS)
            tokens[start : start + 3] = [PLACEHOLDER] * 3
            items = (AudioItem(hash=digest, start=start, length=3, features=np.zeros((1, 4), np.float32)),)
            media = [(start, start + 3, digest.hex())]
        self.scheduler.add(request(f"{number}", tokens, choices.randint(1, 5), cache_salt=salt, items=items))
        hashes = self.scheduler._requests[f"{number}"].block_hashes(BLOCK, self.hasher)
        rendered = {
            "token_ids": tokens,
            "features": {
                "mm_hashes": {"audio": [name for _, _, name in media]},
                "mm_placeholders": {"audio": [{"offset": start, "length": 3} for start, _, _ in media]},
            },
        }
        keys = llmd.request_keys(rendered, "model", BLOCK, salt)
        self.asked.append(Asked([*hashes], keys, dynamo.request_path(tokens, media, BLOCK, salt)))

    def cached(self, asked: Asked) -> int:
        """How many of a prompt's first blocks were computed and can be found, in the group that attends to all."""
        suffix = bytes([self.full]) if self.full else b""
        keys = [key + suffix for key in asked.hashes]
        known = {
            key for key in keys if (block := self.pool._by_hash.get(key)) is not None and block in self.pool._stored
        }
        return next((index for index, key in enumerate(keys) if key not in known), len(keys))


@pytest.mark.parametrize("encoding", ["map", "array"])
@pytest.mark.parametrize("windows", [(None,), (6, None)], ids=["one group", "windows first"])
def test_routers_find_what_the_pool_has(encoding: Encoding, windows: tuple[int | None, ...]) -> None:
    """With salts and media, and while blocks are evicted all the time."""
    choices = random.Random(len(windows))
    followed = Followed(encoding, windows)
    runner = FakeRunner(followed.scheduler)
    found = 0
    for _ in range(150):
        followed.ask(choices)
        for _ in range(choices.randint(1, 4)):
            if followed.scheduler.has_work:
                runner.step()
        for asked in followed.asked[-30:]:
            cached = followed.cached(asked)
            found += cached
            assert followed.indexer.matched(asked.keys) == cached
            assert followed.tree.matched(asked.path) == cached
    assert found > 1000
    assert len(followed.tree.paths) <= 40 < 200 < sum(len(asked.hashes) for asked in followed.asked)
    assert followed.tree.dropped == 0
