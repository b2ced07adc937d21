"""Tokens do not depend on the pieces in which audio arrives, on batching, schedules, memory, device or executor."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.execution.cache import OutOfCacheMemory
from tests.support.engine import Engine, greedy
from tests.support.streaming_models import (
    COLUMNS,
    ENCODER_WINDOW,
    PAD,
    START,
    WINDOW,
    Features,
    audio_of,
    features,
    make_streaming_model,
    save_streaming_model,
)
from tests.support.variants import covering, slow_but

SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "one at a time": {"max_num_seqs": 1},
    "one encoder": {"encoder_cache_memory": 1},
    "small chunks": {"max_num_batched_tokens": 5, "max_num_seqs": 5},
    "small blocks": {"block_size": 3},
    "two steps in flight": {"in_flight": 2, "block_size": 4},
    "three steps in flight, small chunks": {"in_flight": 3, "max_num_batched_tokens": 7, "max_num_seqs": 4},
    "by priority": {"scheduling_policy": "priority", "max_num_seqs": 3},
    "reference device": {"model": ModelOptions(device="reference"), "max_num_batched_tokens": 9, "max_num_seqs": 4},
}
ALL = greedy(1 << 20)
Case = tuple[list[int], Features, SamplingParams]


def workload(seed: int) -> list[Case]:
    """Prompts and audio of different lengths."""
    rng = random.Random(seed)
    cases = []
    for index in range(10):
        length = rng.randint(1, 20)
        params = SamplingParams(
            max_tokens=rng.choice([1 << 20, 1 << 20, 7]), temperature=rng.choice([0.0, 0.0, 1.0]), seed=index
        )
        cases.append(([START, *[PAD] * (length - 1)], features(index, length + rng.randint(1, 90)), params))
    return cases


def piece(audio: Features, first: int, last: int) -> Features:
    """Frames of audio."""
    return audio[:, first * COLUMNS : last * COLUMNS]


def together(engine: Engine, seed: int, *, pieces: bool) -> list[list[int]]:
    """Run a workload, whose audio arrives whole or in pieces, at random steps among others that are aborted."""
    rng = random.Random(seed)
    requests = workload(1)
    sent: dict[int, int] = {}  # frames by index of the request
    step = 0
    while len(sent) < len(requests) or engine.busy or any(sent[i] < total(requests[i]) for i in sent):
        for index, (prompt, audio, params) in enumerate(requests):
            name, frames = f"r{index}", total(requests[index])
            if index not in sent and rng.random() < 0.2:
                first = rng.randint(0, min(frames - 1, 30)) if pieces else frames
                items = (audio_of(piece(audio, 0, first)),) if first else ()
                engine.add(name, prompt, params, items=items, open=first < frames)
                sent[index] = first
            elif index in sent and sent[index] < frames and rng.random() < 0.4:
                end = min(frames, sent[index] + rng.randint(1, 25))
                item = audio_of(piece(audio, sent[index], end))
                engine.extend(name, [], items=(item,), last=end == frames)
                sent[index] = end
        if step % 5 == 1:
            engine.add(f"aborted-{step}", [START, PAD], greedy(99), items=(audio_of(features(step, 20)),), open=True)
        if step % 5 == 3:
            engine.abort(f"aborted-{step - 2}")
        if engine.busy:
            engine.step()
        step += 1
    for number in range(1, step, 5):
        engine.abort(f"aborted-{number}")
    engine.run()
    assert engine.blocks_used == engine.rows_used == 0
    assert all(result.error is None for result in engine.results.values())
    return [engine.results[f"r{index}"].tokens for index in range(len(requests))]


def total(case: Case) -> int:
    """Frames."""
    columns: int = case[1].shape[1]
    return columns // COLUMNS


@pytest.fixture(scope="module")
def alone(streaming_folder: Path) -> list[list[int]]:
    """The tokens of each request of the workload alone in the engine, whole."""
    engine = Engine(streaming_folder)
    outputs = [
        engine.generate(prompt, params, items=(audio_of(audio),)).tokens for prompt, audio, params in workload(1)
    ]
    assert len({tuple(tokens) for tokens in outputs}) > 8
    return outputs


@pytest.mark.parametrize(("schedule", "pieces"), covering(SCHEDULES, [True, False]))
def test_tokens_do_not_depend_on_the_schedule(
    streaming_folder: Path, alone: list[list[int]], schedule: str, pieces: bool
) -> None:
    assert together(Engine(streaming_folder, **SCHEDULES[schedule]), 1, pieces=pieces) == alone


@pytest.mark.parametrize("seed", slow_but(range(4), 0, 1))
def test_tokens_do_not_depend_on_the_pieces(streaming_folder: Path, alone: list[list[int]], seed: int) -> None:
    assert together(Engine(streaming_folder, block_size=4), seed, pieces=True) == alone


@pytest.mark.parametrize("in_flight", [1, 2])
def test_requests_wait_for_blocks_and_are_never_preempted(
    streaming_folder: Path, alone: list[list[int]], in_flight: int
) -> None:
    """The cache holds two windows; each sequence's blocks are reserved until it ends."""
    roomy = Engine(streaming_folder, block_size=4, max_num_batched_tokens=16)
    window = -(-(WINDOW - 1 + 16) // 4) + 1
    size = roomy.state_bytes + 2 * window * roomy.block_bytes
    engine = Engine(
        streaming_folder, block_size=4, max_num_batched_tokens=16, kv_cache_memory_bytes=size, in_flight=in_flight
    )
    assert engine.info.num_blocks == 2 * window
    assert engine.info.max_model_len == roomy.info.max_model_len
    assert together(engine, 3, pieces=True) == alone
    assert engine.preemptions == 0


def test_a_small_cache_bounds_the_audio(streaming_folder: Path) -> None:
    """Fewer blocks than a window has: then the context is as long as they are."""
    roomy = Engine(streaming_folder, block_size=4)
    size = roomy.state_bytes + 13 * roomy.block_bytes
    engine = Engine(streaming_folder, block_size=4, kv_cache_memory_bytes=size)
    assert engine.info.max_model_len == 52
    audio = features(0, 52)
    tokens = engine.generate([START, PAD], greedy(99), items=(audio_of(audio),)).tokens
    assert tokens == roomy.generate([START, PAD], greedy(99), items=(audio_of(audio),)).tokens
    assert "at most 52" in (engine.generate([START], greedy(9), items=(audio_of(features(0, 53)),)).error or "")
    with pytest.raises(OutOfCacheMemory, match="46 of which are the silence around the audio"):
        Engine(streaming_folder, model=ModelOptions(max_model_len=46))


def test_pieces_of_one_frame_give_the_bits_of_the_whole_in_bfloat16(tmp_path: Path) -> None:
    """The tokens of sampling with log-probabilities are equal, and so are these."""
    wide = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    folder = save_streaming_model(make_streaming_model(text=wide).bfloat16(), tmp_path)
    audio, params = features(0, 70), greedy(1 << 20, logprobs=0)
    logprobs = []
    for each in (70, 1, 7):
        engine = Engine(folder, model=ModelOptions(dtype="bfloat16"), block_size=8)
        engine.add("r", [START, PAD, PAD], params, open=True)
        for first in range(0, 70, each):
            engine.extend("r", [], items=(audio_of(piece(audio, first, first + each)),), last=first + each == 70)
            engine.run()
        outputs = engine.results["r"].outputs
        logprobs.append([entry.logprobs[0] for output in outputs for entry in output.logprobs or ()])
        assert len(logprobs[-1]) == 67
    assert logprobs[1] == logprobs[2] == pytest.approx(logprobs[0], abs=2e-2)


def test_memory_stays_flat_over_a_minute(streaming_folder: Path) -> None:
    """A minute in pieces of 0.4 s: blocks, encoder and features that wait are bounded by the windows."""
    engine = Engine(streaming_folder, block_size=4, max_num_batched_tokens=16, max_num_seqs=2)
    scheduler: Any = engine.core.scheduler
    items = engine.runner.items
    frames, most = 750, 0
    audio = features(0, 200)
    engine.add("r", [START, PAD, PAD], ALL, open=True)
    for first in range(0, frames, 5):
        part = piece(audio, first % 200, first % 200 + 5)
        engine.extend("r", [], items=(audio_of(part),), last=first + 5 >= frames)
        engine.run()
        most = max(most, engine.blocks_used)
        if first + 5 < frames:
            request = scheduler._requests["r"]
            assert not request._features
    assert len(engine.results["r"].tokens) == frames - 3
    assert most <= -(-(WINDOW - 1 + 16) // 4) + 1
    pages = items._size.pages
    assert pages <= (ENCODER_WINDOW + 4 * 64) // 4 + 2
    assert items._cache.layers[0].keys.shape[1] == 2 * pages
    assert items._embeddings.shape[:2] == (2, 2 * 64)
    assert engine.blocks_used == engine.rows_used == 0


def test_the_end_of_the_audio_may_come_after_its_last_frame(streaming_folder: Path) -> None:
    """Then the token behind the last frame has been generated."""
    engine = Engine(streaming_folder)
    audio = features(0, 30)
    whole = engine.generate([START, PAD], ALL, items=(audio_of(audio),)).tokens
    engine.add("r", [START, PAD], ALL, items=(audio_of(audio),), open=True)
    engine.run()
    assert not engine.results["r"].finish_reason
    engine.extend("r", [], last=True)
    engine.run()
    result = engine.results["r"]
    assert (result.tokens[:-1], result.finish_reason) == (whole, "stop")
    assert engine.blocks_used == engine.rows_used == 0
    # Of a sequence whose next token is being computed, that is the last one.
    engine = Engine(streaming_folder, in_flight=2)
    engine.add("r", [START, PAD], ALL, items=(audio_of(audio),), open=True)
    while len(engine.results["r"].tokens) < 28:
        engine.step()
    engine.extend("r", [], last=True)
    engine.run()
    assert engine.results["r"].tokens[:28] == whole
    assert engine.results["r"].finish_reason == "stop"


def test_long_files_do_not_hold_up_live_audio(streaming_folder: Path) -> None:
    """A step has room for two pieces of the prompts of files; the live sequence has its turn in the next one."""
    engine = Engine(streaming_folder)
    for index in range(4):
        engine.add(f"file-{index}", [START, *[PAD] * 999], ALL, items=(audio_of(features(index, 1010)),))
    engine.add("live", [START], ALL, open=True)
    engine.step()
    for number in range(3):
        before = len(engine.results["live"].tokens)
        engine.extend("live", [], items=(audio_of(features(number, 1)),))
        for _ in range(3):
            engine.step()
        assert len(engine.results["live"].tokens) > before
    assert not any(engine.results[f"file-{index}"].tokens for index in range(4))


def test_a_step_that_fails_ends_one_sequence(streaming_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on as if nothing had happened: their encoders have not read anything twice."""
    engine = Engine(streaming_folder)
    audio = {name: features(index, 50) for index, name in enumerate(("good", "bad", "other"))}
    expected = {n: engine.generate([START, PAD], greedy(999), items=(audio_of(a),)).tokens for n, a in audio.items()}
    encode = engine.runner.items.encode

    def fail(pieces: Any) -> None:
        if any(piece.request_id == "bad" and piece.first for piece in pieces):
            raise RuntimeError("no")
        encode(pieces)

    monkeypatch.setattr(engine.runner.items, "encode", fail)
    for name, samples in audio.items():
        engine.add(name, [START, PAD], greedy(999), items=(audio_of(piece(samples, 0, 20)),), open=True)
    engine.run()
    for name, samples in audio.items():
        engine.extend(name, [], items=(audio_of(piece(samples, 20, 50)),), last=True)
    engine.run()
    assert "the model failed" in (engine.results["bad"].error or "")
    for name in ("good", "other"):
        assert engine.results[name].tokens == expected[name]
    assert engine.blocks_used == engine.rows_used == 0
