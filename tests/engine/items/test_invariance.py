"""What a request with items gives does not depend on batching, chunking, preemption, hits, device or executor."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.config.options import ModelOptions
from quire.engine.client.audio import AudioInfo
from quire.engine.client.protocol import MediaItem
from quire.engine.client.sampling_params import SamplingParams
from tests.support.audio_models import KINDS, PLACEHOLDER, noise, prompt_with
from tests.support.engine import Engine, greedy
from tests.support.variants import covering
from tests.support.vision_models import MadeWhenAsked

SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "one at a time": {"max_num_seqs": 1},
    "small chunks": {"max_num_batched_tokens": 5, "max_num_seqs": 5},
    "small blocks": {"block_size": 3},
    "without prefix caching": {"enable_prefix_caching": False},
    "no room for a second item": {"encoder_cache_memory": 1},
    "speculation": {"speculative_method": "ngram", "num_speculative_tokens": 4, "block_size": 4},
    "two steps in flight": {"in_flight": 2, "block_size": 4},
    "two steps in flight, small chunks": {
        "in_flight": 2,
        "max_num_batched_tokens": 7,
        "max_num_seqs": 4,
        "encoder_cache_memory": 1,
    },
    "reference device": {"model": ModelOptions(device="reference"), "max_num_batched_tokens": 9, "max_num_seqs": 4},
}
LONG_ITEMS = ("granite_speech", "granite_speech_plus", "phi4_multimodal")  # of which one has room in any cache
Case = tuple[list[int], tuple[MediaItem, ...], SamplingParams]


def workload(seed: int, info: AudioInfo) -> list[Case]:
    """Prompts with up to three pieces of audio, of which there are four; many begin alike."""
    rng = random.Random(seed)
    longest = 1.0 if info.max_items else 2.3
    cases: list[Case] = []
    for _ in range(10):
        parts: list[Any] = [[5, 9]]
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            sound = rng.randint(0, 3)
            parts += [noise(sound, (0.35, 0.62, 1.0, longest)[sound]), [rng.randint(20, 22)] * rng.randint(0, 2)]
        prompt, items = prompt_with(info, *parts, [rng.randint(0, 200)])
        params = SamplingParams(
            max_tokens=rng.randint(1, 14), temperature=rng.choice([0.0, 0.0, 1.0]), seed=rng.randint(0, 1 << 30)
        )
        cases.append((prompt, items, params))
    return cases


def together(engine: Engine, seed: int) -> list[list[int]]:
    """Run a workload, whose requests arrive at random steps among others that are aborted."""
    rng = random.Random(seed)
    requests = workload(seed, engine.audio)
    pending = [(rng.randint(0, 8), index) for index in range(len(requests))]
    step = 0
    while pending or engine.busy:
        for entry in [entry for entry in pending if entry[0] <= step]:
            pending.remove(entry)
            prompt, items, params = requests[entry[1]]
            engine.add(f"r{entry[1]}", prompt, params, items=items)
        if step % 4 == 1:
            prompt, items = prompt_with(engine.audio, [5], noise(rng.randint(0, 9), 0.5), [6])
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
def alone(audio_folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """The tokens of each request of a workload alone in the engine, without prefix caching, by kind."""

    def generate(kind: str) -> list[list[int]]:
        engine = Engine(audio_folders[kind], enable_prefix_caching=False)
        requests = workload(1, engine.audio)
        tokens = [engine.generate(prompt, params, items=items).tokens for prompt, items, params in requests]
        assert len({tuple(answer) for answer in tokens}) > 6
        return tokens

    return MadeWhenAsked(generate)


@pytest.mark.parametrize(("kind", "schedule"), covering(KINDS, SCHEDULES))
def test_tokens_do_not_depend_on_the_schedule(
    audio_folders: dict[str, Path], alone: dict[str, list[list[int]]], schedule: str, kind: str
) -> None:
    assert together(Engine(audio_folders[kind], **SCHEDULES[schedule]), 1) == alone[kind]


@pytest.mark.parametrize(("kind", "options"), covering(KINDS, [{}, {"in_flight": 2}, {"encoder_cache_memory": 1}]))
def test_tokens_do_not_depend_on_preemption(
    audio_folders: dict[str, Path], alone: dict[str, list[list[int]]], kind: str, options: dict[str, Any]
) -> None:
    """The cache holds little more than the longest request, so that they preempt each other."""
    roomy = Engine(audio_folders[kind], block_size=4)
    longest = max(len(prompt) + params.max_tokens for prompt, _, params in workload(1, roomy.audio))
    size = (longest // 4 + 1) * roomy.block_bytes
    model = ModelOptions(max_model_len=longest)
    engine = Engine(audio_folders[kind], model=model, block_size=4, kv_cache_memory_bytes=size, **options)
    assert together(engine, 1) == alone[kind]
    assert engine.preemptions > 0


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_in_pieces(audio_folders: dict[str, Path], alone: dict[str, list[list[int]]], kind: str) -> None:
    """Each piece of audio, and each text, comes by itself; the engine computes between."""
    engine = Engine(audio_folders[kind], max_num_batched_tokens=7, max_num_seqs=4, block_size=4)
    for index, (prompt, items, params) in enumerate(workload(1, engine.audio)):
        name = f"r{index}"
        engine.add(name, prompt[:2], params, open=True)
        begin = 2
        for item in items:
            engine.extend(name, prompt[begin : item.start])
            placeholders = prompt[item.start : item.start + item.length]
            engine.extend(name, placeholders, items=(msgspec.structs.replace(item, start=0),))
            begin = item.start + item.length
            for _ in range(index % 4):
                if engine.busy:
                    engine.step()
        engine.extend(name, prompt[begin:], last=True)
        engine.run()
        assert engine.results[name].error is None
        assert engine.results[name].tokens == alone[kind][index]


def sequence(engine: Engine, *parts: Any, **fields: Any) -> Any:
    """The result of a request for two tokens."""
    prompt, items = prompt_with(engine.audio, *parts)
    return engine.generate(prompt, greedy(2), items=items, **fields)


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_are_shared_on_equal_items_only(audio_folders: dict[str, Path], kind: str) -> None:
    """The tokens are the same in all of these prompts."""
    engine = Engine(audio_folders[kind], block_size=4)
    length = len(prompt_with(engine.audio, noise(0, 1.0))[0])
    whole = (8 + length) // 4 * 4
    for sound, cached in ((0, 0), (0, whole), (1, 4), (1, whole), (0, whole)):
        result = sequence(engine, [5, 9, 7, 8, 3], noise(sound, 1.0), [1, 2, 3, 4])
        assert result.outputs[0].cached_tokens == cached
    assert (engine.items_encoded, engine.items_cached) == (2, 0)
    assert sequence(engine, [5, 9, 7, 8, 3], noise(0, 1.0), [1, 2, 3, 4], cache_salt="x").outputs[0].cached_tokens == 0
    assert engine.items_encoded == 3


def test_equal_tokens_with_an_item_at_another_place(audio_folders: dict[str, Path]) -> None:
    """A placeholder before the item or behind it, which is a token like others: the ids are the same."""
    engine = Engine(audio_folders["voxtral"], block_size=4)
    fresh = Engine(audio_folders["voxtral"], enable_prefix_caching=False)
    sound = noise(0, 0.9)
    for parts in (([7, PLACEHOLDER], sound), ([7], sound, [PLACEHOLDER])):
        result = sequence(engine, *parts, [3])
        assert result.outputs[0].cached_tokens == 0
        assert result.tokens == sequence(fresh, *parts, [3]).tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_that_ends_within_an_item(audio_folders: dict[str, Path], kind: str) -> None:
    """The rest of the item is computed from its embeddings, which are kept, or made again."""
    head = [5, 9, 3] if kind in ("qwen3_asr", "phi4_multimodal") else [5, 9]
    for keeps in (True, False):
        engine = Engine(audio_folders[kind], block_size=4, encoder_cache_memory=1 << 20 if keeps else 1)
        fresh = Engine(audio_folders[kind], enable_prefix_caching=False)
        if not keeps and kind in LONG_ITEMS:
            engine.core.scheduler._encoder_cache._capacity = 10  # type: ignore[union-attr]
        sequence(engine, head, noise(0, 0.8))
        if not keeps:
            # Takes the place of the first item's embeddings.
            sequence(engine, [6], noise(1, 2.0 if kind == "qwen3_asr" else 0.8))
        before = engine.items_encoded
        for tail in ([40, 41], [50, 51]):
            result = sequence(engine, head, noise(0, 0.8), tail)
            assert result.tokens == sequence(fresh, head, noise(0, 0.8), tail).tokens
        length = len(prompt_with(engine.audio, head, noise(0, 0.8))[0])
        assert length % 4, "the hit is to end within the item"
        assert engine.items_encoded - before == (0 if keeps else 1)


def test_an_item_of_several_chunks_is_encoded_once(audio_folders: dict[str, Path]) -> None:
    """So are equal items of one prompt, and of several at the same time."""
    engine = Engine(
        audio_folders["qwen2_audio"], max_num_batched_tokens=4, max_num_seqs=4, prefix_caching_hash_algo="xxhash"
    )
    encode, encoded = engine.runner.items.encode, list[bytes]()

    def counting(entries: Any) -> None:
        encoded.extend(entry.key for entry in entries)
        encode(entries)

    engine.runner.items.encode = counting
    prompt, items = prompt_with(engine.audio, noise(0, 1.0), [3], noise(1, 1.0), [4], noise(0, 1.0), [5])
    for index in range(3):
        engine.add(str(index), [index, *prompt[1:]], greedy(3), items=items[1:])
    engine.run()
    assert len(encoded) == len(set(encoded)) == 2


def test_a_step_encodes_within_its_budget(audio_folders: dict[str, Path]) -> None:
    """Items beyond the budget wait for the next step; the first one is encoded however long it is."""
    engine = Engine(audio_folders["qwen2_audio"], max_num_batched_tokens=30, max_num_seqs=8)
    encode, counts = engine.runner.items.encode, list[int]()

    def counting(entries: Any) -> None:
        counts.append(sum(entry.item.length for entry in entries))
        encode(entries)

    engine.runner.items.encode = counting
    for index in range(6):
        prompt, items = prompt_with(engine.audio, [index], noise(index, 0.5), [7])
        engine.add(str(index), prompt, greedy(2), items=items)
    engine.run()
    assert max(counts) <= 30
    assert sum(counts) == 6 * 12
    small = Engine(audio_folders["qwen2_audio"], max_num_batched_tokens=4, max_num_seqs=4)
    assert sequence(small, [1], noise(0, 1.0), [2]).error is None


def test_an_item_that_cannot_be_encoded_fails_alone(
    audio_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with it fail, others and later ones do not, and nothing of it is found again."""
    engine = Engine(audio_folders["qwen2_audio"], block_size=4)
    info = engine.audio
    (bad,) = prompt_with(info, noise(7, 0.5))[1]
    encode, broken = engine.runner.items.encode, True

    def fail(entries: Any) -> None:
        if broken and any(entry.item.hash == bad.hash for entry in entries):
            raise RuntimeError("no")
        encode(entries)

    monkeypatch.setattr(engine.runner.items, "encode", fail)
    for name, sound in (("good", 1), ("bad", 7), ("too", 7), ("other", 2)):
        prompt, items = prompt_with(info, [4], noise(sound, 0.5), [5])
        engine.add(name, prompt, greedy(4), items=items)
    engine.run()
    assert {name for name, result in engine.results.items() if result.error is not None} == {"bad", "too"}
    assert engine.blocks_used == 0
    broken = False
    again = sequence(engine, [4], noise(7, 0.5), [5])
    assert again.tokens == sequence(Engine(audio_folders["qwen2_audio"]), [4], noise(7, 0.5), [5]).tokens


def test_log_probabilities_of_prompts_with_items(audio_folders: dict[str, Path]) -> None:
    """Every token is computed, and each chunk has the item's embeddings."""
    results = []
    for tokens in (512, 5):
        engine = Engine(audio_folders["voxtral"], max_num_batched_tokens=tokens, max_num_seqs=4)
        prompt, items = prompt_with(engine.audio, [1, 2], noise(0, 1.0), [3, 4])
        for _ in range(2):
            result = engine.generate(prompt, greedy(1, prompt_logprobs=1), items=items)
            reported = result.outputs[0].prompt_logprobs
            assert reported is not None
            results.append([None if entry is None else entry.logprobs[0] for entry in reported])
    assert all(result[1:] == pytest.approx(results[0][1:], abs=1e-4) for result in results)
