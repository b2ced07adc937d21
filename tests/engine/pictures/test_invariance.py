"""What a request with pictures gives does not depend on batching, chunking, preemption, hits, device or executor."""

from __future__ import annotations

import random
from itertools import cycle, product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.config.options import ModelOptions
from quire.engine.client.pictures import PictureInfo
from quire.engine.client.protocol import PictureItem
from quire.engine.client.sampling_params import SamplingParams
from tests.support.engine import Engine, greedy
from tests.support.pictures import drawn
from tests.support.variants import covering, slow_but
from tests.support.vision_models import SEES, MadeWhenAsked, prompt_with_pictures

# One of each geometry, one with levels of embeddings, three whose pictures or prompts attend in both directions (one in
# layers with a window only). Their largest items are of 4, 24, 10, 20, 12, 12, 16, 4, 68 and 4 tokens.
PREFIX_LM = "paligemma2"
CASES = (
    *("smolvlm", "llava_next", "internvl", "mistral3", "qwen2_5_vl", "qwen3_vl", "gemma3-narrow", PREFIX_LM),
    *("gemma4-experts", "llama4"),
)
CAUSAL_TEXT = tuple(case for case in CASES if case != PREFIX_LM)
SIZES = ((30, 40), (56, 56), (20, 90), (75, 33))
SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "one at a time": {"max_num_seqs": 1},
    "small chunks": {"max_num_batched_tokens": 5, "max_num_seqs": 5},
    "small blocks": {"block_size": 3},
    "without prefix caching": {"enable_prefix_caching": False},
    "speculation": {"speculative_method": "ngram", "num_speculative_tokens": 4, "block_size": 4},
    "two steps in flight": {"in_flight": 2, "block_size": 4},
    "two steps in flight, small chunks": {"in_flight": 2, "max_num_batched_tokens": 7, "max_num_seqs": 4},
    "reference device": {"model": ModelOptions(device="reference"), "max_num_batched_tokens": 9, "max_num_seqs": 4},
}
Case = tuple[list[int], tuple[PictureItem, ...], SamplingParams]


def engine_of(folders: dict[str, Path], case: str, **options: Any) -> Engine:
    """An engine whose steps have room for what it computes as a whole."""
    if "max_num_batched_tokens" in options:
        options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], SEES[case].least_step)
    return Engine(folders[case], **options)


def workload(seed: int, info: PictureInfo) -> list[Case]:
    """Prompts with up to three pictures, of which there are four; many begin alike."""
    rng = random.Random(seed)
    cases = []
    for _ in range(8):
        parts: list[Any] = [[5, 9]]
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            number = rng.randint(0, 3)
            parts += [drawn(*SIZES[number], seed=number), [rng.randint(20, 22)] * rng.randint(0, 2)]
        prompt, items = prompt_with_pictures(info, *parts, [rng.randint(0, 200)])
        params = SamplingParams(
            max_tokens=rng.randint(1, 12), temperature=rng.choice([0.0, 0.0, 1.0]), seed=rng.randint(0, 1 << 30)
        )
        cases.append((prompt, items, params))
    return cases


def together(engine: Engine, seed: int) -> list[list[int]]:
    """Run a workload, whose requests arrive at random steps among others that are aborted."""
    rng = random.Random(seed)
    requests = workload(seed, engine.pictures)
    pending = [(rng.randint(0, 8), index) for index in range(len(requests))]
    step = 0
    while pending or engine.busy:
        for entry in [entry for entry in pending if entry[0] <= step]:
            pending.remove(entry)
            prompt, items, params = requests[entry[1]]
            engine.add(f"r{entry[1]}", prompt, params, items=items)
        if step % 4 == 1:
            prompt, items = prompt_with_pictures(engine.pictures, [5], drawn(40, 40, seed=rng.randint(0, 9)), [6])
            engine.add(f"aborted-{step}", prompt, greedy(30), items=items)
        if step % 4 == 3:
            engine.abort(f"aborted-{step - 2}")
        if engine.busy:
            engine.step()
        step += 1
    assert engine.blocks_used == 0
    assert all(result.error is None for result in engine.results.values())
    return [engine.results[f"r{index}"].tokens for index in range(len(requests))]


@pytest.fixture(scope="module")
def alone(seeing_folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """The tokens of each request of a workload alone in the engine, without prefix caching, by case."""

    def generate(case: str) -> list[list[int]]:
        engine = Engine(seeing_folders[case], enable_prefix_caching=False)
        requests = workload(1, engine.pictures)
        tokens = [engine.generate(prompt, params, items=items).tokens for prompt, items, params in requests]
        assert len({tuple(answer) for answer in tokens}) > 5
        return tokens

    return MadeWhenAsked(generate)


# Chunks are what spans in both directions change.
_CHUNKS = [("gemma3-narrow", "small chunks"), (PREFIX_LM, "two steps in flight, small chunks")]
_CHUNKS += [("gemma4-experts", "small chunks"), ("gemma4", "two steps in flight, small chunks")]


@pytest.mark.parametrize(
    ("case", "schedule"),
    slow_but(product((*CASES, "gemma4"), SCHEDULES), *_CHUNKS, *zip(cycle(CASES), SCHEDULES, strict=False)),
)
def test_tokens_do_not_depend_on_the_schedule(
    seeing_folders: dict[str, Path], alone: dict[str, list[list[int]]], schedule: str, case: str
) -> None:
    assert together(engine_of(seeing_folders, case, **SCHEDULES[schedule]), 1) == alone[case]


@pytest.mark.parametrize("case", CASES)
def test_tokens_do_not_depend_on_room_for_items(
    seeing_folders: dict[str, Path], alone: dict[str, list[list[int]]], case: str
) -> None:
    """One picture at a time is encoded and kept, or those of one prompt."""
    engine = engine_of(seeing_folders, case, max_num_batched_tokens=7, max_num_seqs=4)
    cache = engine.core.scheduler._encoder_cache  # type: ignore[union-attr]
    lengths = [[item.length for item in items] for _, items, _ in workload(1, engine.pictures) if items]
    cache._capacity = max(map(sum if case == PREFIX_LM else max, lengths))
    assert together(engine, 1) == alone[case]


# Of Gemma 4's layers most free what is before their window, so that a cache for one request has room for several.
@pytest.mark.parametrize(
    ("case", "options"), covering([case for case in CASES if case != "gemma4-experts"], [{}, {"in_flight": 2}])
)
def test_tokens_do_not_depend_on_preemption(
    seeing_folders: dict[str, Path], alone: dict[str, list[list[int]]], case: str, options: dict[str, Any]
) -> None:
    """The cache holds little more than the longest request, so that they preempt each other."""
    roomy = Engine(seeing_folders[case], block_size=4)
    longest = max(len(prompt) + params.max_tokens for prompt, _, params in workload(1, roomy.pictures))
    size = (longest // 4 + 1) * roomy.block_bytes
    model = ModelOptions(max_model_len=longest)
    engine = Engine(seeing_folders[case], model=model, block_size=4, kv_cache_memory_bytes=size, **options)
    assert together(engine, 1) == alone[case]
    assert engine.preemptions > 0


@pytest.mark.parametrize("case", CAUSAL_TEXT)
def test_prompts_in_pieces(seeing_folders: dict[str, Path], alone: dict[str, list[list[int]]], case: str) -> None:
    """Each item, and each text, comes by itself; the engine computes between."""
    engine = engine_of(seeing_folders, case, max_num_batched_tokens=7, max_num_seqs=4, block_size=4)
    for index, (prompt, items, params) in enumerate(workload(1, engine.pictures)):
        name = f"r{index}"
        engine.add(name, prompt[:2], params, open=True)
        begin = 2
        for item in items:
            engine.extend(name, prompt[begin : item.start])
            begin = item.start + item.length
            engine.extend(name, prompt[item.start : begin], items=(msgspec.structs.replace(item, start=0),))
            for _ in range(index % 4):
                if engine.busy:
                    engine.step()
        engine.extend(name, prompt[begin:], last=True)
        engine.run()
        assert engine.results[name].error is None
        assert engine.results[name].tokens == alone[case][index]


def answer(engine: Engine, *parts: Any, **fields: Any) -> Any:
    """The result of a request for two tokens."""
    prompt, items = prompt_with_pictures(engine.pictures, *parts)
    return engine.generate(prompt, greedy(2), items=items, **fields)


@pytest.mark.parametrize("case", CAUSAL_TEXT)
def test_prefixes_are_shared_on_equal_pictures_only(seeing_folders: dict[str, Path], case: str) -> None:
    """The tokens are the same in all of these prompts."""
    engine = Engine(seeing_folders[case], block_size=4)
    picture, other = (drawn(56, 56, seed=seed) for seed in (0, 1))
    tokens, items = prompt_with_pictures(engine.pictures, picture)
    whole = (8 + len(tokens)) // 4 * 4
    for shown, cached in ((picture, 0), (picture, whole), (other, 4), (other, whole), (picture, whole)):
        result = answer(engine, [5, 9, 7, 8, 3], shown, [1, 2, 3, 4])
        assert result.outputs[0].cached_tokens == cached
    assert (engine.items_encoded, engine.items_cached) == (2 * len(items), 0)
    assert answer(engine, [5, 9, 7, 8, 3], picture, [1, 2, 3, 4], cache_salt="x").outputs[0].cached_tokens == 0
    assert engine.items_encoded == 3 * len(items)


@pytest.mark.parametrize("case", CAUSAL_TEXT)
def test_a_hit_that_ends_within_a_picture(seeing_folders: dict[str, Path], case: str) -> None:
    """The rest of it is computed from its embeddings, which are kept."""
    engine = Engine(seeing_folders[case], block_size=3)
    fresh = Engine(seeing_folders[case], enable_prefix_caching=False)
    picture = drawn(56, 56)
    length = len(prompt_with_pictures(engine.pictures, picture)[0])
    head = [5] * ((2 - length) % 3 or 3)  # the last block of head and picture is not full
    answer(engine, head, picture)
    encoded = engine.items_encoded
    for tail in ([40, 41], [50, 51]):
        result = answer(engine, head, picture, tail)
        assert result.outputs[0].cached_tokens > 0
        assert result.tokens == answer(fresh, head, picture, tail).tokens
    assert engine.items_encoded == encoded


def test_a_picture_that_cannot_be_encoded_fails_alone(
    seeing_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with it fail, others and later ones do not, and nothing of it is found again."""
    engine = Engine(seeing_folders["llava_next"], block_size=4)
    (bad,) = prompt_with_pictures(engine.pictures, drawn(40, 40, seed=7))[1]
    vision = engine.runner.model.vision
    encode, broken = vision.encode, True

    def fail(item: PictureItem) -> Any:
        if broken and item.hash == bad.hash:
            raise RuntimeError("no")
        return encode(item)

    monkeypatch.setattr(vision, "encode", fail)
    for name, seed in (("good", 1), ("bad", 7), ("too", 7), ("other", 2)):
        prompt, items = prompt_with_pictures(engine.pictures, [4], drawn(40, 40, seed=seed), [5])
        engine.add(name, prompt, greedy(4), items=items)
    engine.run()
    assert {name for name, result in engine.results.items() if result.error is not None} == {"bad", "too"}
    assert engine.blocks_used == 0
    broken = False
    again = answer(engine, [4], drawn(40, 40, seed=7), [5])
    fresh = Engine(seeing_folders["llava_next"])
    assert again.tokens == answer(fresh, [4], drawn(40, 40, seed=7), [5]).tokens


def test_the_language_model_alone(seeing_folders: dict[str, Path]) -> None:
    """It answers text as before, holds no tower, and refuses pictures."""
    whole = Engine(seeing_folders["llava"])
    alone = Engine(seeing_folders["llava"], model=ModelOptions(language_model_only=True))
    assert alone.info.weight_bytes < whole.info.weight_bytes
    assert alone.generate([5, 6, 7], greedy(5)).tokens == whole.generate([5, 6, 7], greedy(5)).tokens
    prompt, items = prompt_with_pictures(whole.pictures, [1], drawn(20, 20), [2])
    assert alone.generate(prompt, greedy(2), items=items).error == "the model does not accept pictures, only text"


def test_a_step_encodes_few_pictures_beside_running_requests(seeing_folders: dict[str, Path]) -> None:
    """Tiles whose encoding takes as long as a whole step are encoded in steps of their own, and others go on."""
    engine = Engine(seeing_folders["smolvlm"])
    prompt, items = prompt_with_pictures(engine.pictures, [4], drawn(90, 90), [5])
    assert len(items) == 5
    cache = engine.core.scheduler._encoder_cache  # type: ignore[union-attr]
    cache._pixel_cost = 512 / (56 * 56)
    engine.add("running", [1, 2], greedy(20))
    engine.step()
    engine.add("seeing", prompt, greedy(2), items=items)
    for step in range(1, 6):
        engine.step()
        assert engine.items_encoded == step
        assert len(engine.results["running"].tokens) == step + 1
    engine.run()
    assert (
        engine.results["seeing"].tokens
        == Engine(seeing_folders["smolvlm"]).generate(prompt, greedy(2), items=items).tokens
    )
