"""What a request on an item gives does not depend on batching, chunking, preemption, hits, device or executor."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions
from quire.engine.client.protocol import MediaItem
from quire.engine.client.sampling_params import SamplingParams
from tests.support.engine import Engine, greedy
from tests.support.variants import covering
from tests.support.whisper import END, ENGLISH, POSITIONS, PREVIOUS, RULE, START, TRANSCRIBE, item

SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "one at a time": {"max_num_seqs": 1},
    "small chunks": {"max_num_batched_tokens": 4, "max_num_seqs": 3},
    "small blocks": {"block_size": 3},
    "without prefix caching": {"enable_prefix_caching": False},
    "speculation": {"speculative_method": "ngram", "num_speculative_tokens": 4, "block_size": 4},
    "two steps in flight": {"in_flight": 2, "block_size": 4},
    "reference device": {"model": ModelOptions(device="reference")},
    "reference device, small chunks": {
        "model": ModelOptions(device="reference"),
        "max_num_batched_tokens": 4,
        "max_num_seqs": 3,
    },
}


LENGTHS = (POSITIONS, 9, POSITIONS, 22)  # positions of the items


def heard(number: int) -> MediaItem:
    """Items of different lengths."""
    return item(number, LENGTHS[number % len(LENGTHS)])


def workload(seed: int) -> list[tuple[int, list[int], SamplingParams]]:
    """Item, prompt and parameters of requests; several are on the same item, with prompts that begin alike."""
    rng = random.Random(seed)
    out = []
    for _ in range(10):
        earlier = list(range(10, 10 + rng.choice([0, 4, 9])))
        prompt = [*([PREVIOUS, *earlier] if earlier else []), START, ENGLISH, TRANSCRIBE]
        params = SamplingParams(
            max_tokens=rng.randint(1, 20),
            temperature=rng.choice([0.0, 0.0, 1.0]),
            eos_token_ids=(END,),
            seed=rng.randint(0, 1 << 30),
            timestamp_rule=rng.choice([RULE, None]),
        )
        out.append((rng.randint(0, 3), prompt, params))
    return out


def together(engine: Engine, seed: int) -> list[list[int]]:
    """Run a workload, whose requests arrive at random steps among others that are aborted."""
    rng = random.Random(seed)
    requests = workload(seed)
    pending = [(rng.randint(0, 8), index) for index in range(len(requests))]
    step = 0
    while pending or engine.busy:
        for entry in [entry for entry in pending if entry[0] <= step]:
            pending.remove(entry)
            number, prompt, params = requests[entry[1]]
            engine.add(f"r{entry[1]}", prompt, params, items=(heard(number),))
        if step % 4 == 1:
            engine.add(f"aborted-{step}", [START], greedy(30), items=(heard(rng.randint(0, 9)),))
        if step % 4 == 3:
            engine.abort(f"aborted-{step - 2}")
        if engine.busy:
            engine.step()
        step += 1
    assert engine.blocks_used == 0
    assert all(result.error is None for result in engine.results.values())
    return [engine.results[f"r{index}"].tokens for index in range(len(requests))]


@pytest.fixture(scope="module")
def alone(whisper_folder: Path) -> dict[int, list[list[int]]]:
    """The tokens of each request of two workloads alone in the engine, without prefix caching."""
    engine = Engine(whisper_folder, enable_prefix_caching=False)
    return {
        seed: [engine.generate(prompt, params, items=(heard(n),)).tokens for n, prompt, params in workload(seed)]
        for seed in (1, 2)
    }


@pytest.mark.parametrize(("schedule", "seed"), covering(SCHEDULES, [1, 2]))
def test_tokens_do_not_depend_on_the_schedule(
    whisper_folder: Path, alone: dict[int, list[list[int]]], schedule: str, seed: int
) -> None:
    assert together(Engine(whisper_folder, **SCHEDULES[schedule]), seed) == alone[seed]


@pytest.mark.parametrize("options", [{}, {"in_flight": 2}, {"enable_prefix_caching": False}], ids=str)
def test_tokens_do_not_depend_on_preemption(
    whisper_folder: Path, alone: dict[int, list[list[int]]], options: dict[str, Any]
) -> None:
    """The cache holds two and a half requests, so that they preempt each other, and evict each other's items."""
    roomy = Engine(whisper_folder, block_size=4)
    blocks = 2 * (POSITIONS + 16) // 4 + 8
    preemptions = 0
    for seed in (1, 2):
        engine = Engine(whisper_folder, block_size=4, kv_cache_memory_bytes=blocks * roomy.block_bytes, **options)
        assert together(engine, seed) == alone[seed]
        preemptions += engine.preemptions
    assert preemptions > 0


def test_equal_items_are_encoded_once(whisper_folder: Path) -> None:
    """In one step, and as long as the blocks are not needed; with another salt they are not found."""
    engine = Engine(whisper_folder)
    for index in range(3):
        engine.add(str(index), [START], greedy(4), items=(item(index % 2),))
    engine.run()
    assert (engine.items_encoded, engine.items_cached) == (2, 1)
    cached = engine.generate([START, ENGLISH, TRANSCRIBE], greedy(4), items=(item(1),))
    assert (engine.items_encoded, engine.items_cached) == (2, 2)
    fresh = Engine(whisper_folder).generate([START, ENGLISH, TRANSCRIBE], greedy(4), items=(item(1),))
    assert cached.tokens == fresh.tokens
    engine.generate([START], greedy(4), items=(item(1),), cache_salt="other")
    assert engine.items_encoded == 3


def test_a_prefix_is_shared_on_equal_items_only(whisper_folder: Path) -> None:
    engine = Engine(whisper_folder, block_size=4)
    prompt = [PREVIOUS, *range(10, 20), START]
    for number, cached in ((0, 0), (0, 8), (1, 0), (1, 8)):
        result = engine.generate(prompt, greedy(2), items=(item(number),))
        assert result.outputs[0].cached_tokens == cached


def test_an_item_that_was_evicted_in_part_is_encoded_again(whisper_folder: Path) -> None:
    roomy = Engine(whisper_folder, block_size=4)
    engine = Engine(whisper_folder, block_size=4, kv_cache_memory_bytes=(POSITIONS // 4 + 6) * roomy.block_bytes)
    first = engine.generate([START], greedy(10), items=(item(0),)).tokens
    engine.generate([START], greedy(10), items=(item(1),))  # takes some of the first one's blocks
    assert engine.generate([START], greedy(10), items=(item(0),)).tokens == first
    assert engine.items_encoded == 3
    engine.core.scheduler.check()


def test_an_item_that_cannot_be_encoded_fails_alone(whisper_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests on it fail, others and later ones do not, and nothing of it is found again."""
    engine = Engine(whisper_folder)
    encode, bad = engine.runner.items.encode, item(7)
    broken = True

    def fail(entries: Any) -> None:
        if broken and any(entry.item.hash == bad.hash for entry in entries):
            raise RuntimeError("no")
        encode(entries)

    monkeypatch.setattr(engine.runner.items, "encode", fail)
    for name, request_item in (("good", item(1)), ("bad", bad), ("too", bad), ("other", item(2))):
        engine.add(name, [START], greedy(4), items=(request_item,))
    engine.run()
    failed = {name for name, result in engine.results.items() if result.error is not None}
    assert failed == {"bad", "too"}
    assert engine.blocks_used == 0
    broken = False
    again = engine.generate([START], greedy(4), items=(bad,))
    assert again.tokens == Engine(whisper_folder).generate([START], greedy(4), items=(bad,)).tokens
