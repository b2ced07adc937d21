"""Tokens of a transducer do not depend on the pieces in which audio arrives, on batching, schedules or memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions
from tests.support.engine import Engine, greedy
from tests.support.transducer_models import (
    BLANK,
    CHUNK,
    FACTOR,
    Features,
    audio_of,
    features,
)
from tests.support.variants import covering, slow_but

SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "one at a time": {"max_num_seqs": 1},
    "one state": {"encoder_cache_memory": 1},
    "few frames in a step": {"max_num_batched_tokens": 5, "max_num_seqs": 5},
    "two steps in flight": {"in_flight": 2},
    "three steps in flight, few sequences": {"in_flight": 3, "max_num_seqs": 4},
    "by priority": {"scheduling_policy": "priority", "max_num_seqs": 3},
    "reference device": {"model": ModelOptions(device="reference"), "max_num_seqs": 4},
}
ALL = greedy(1 << 20)


def workload() -> list[Features]:
    """Audio of different lengths."""
    rng = random.Random(1)
    lengths = [1, 20, 57, *(rng.randint(60, 1200) for _ in range(7))]
    return [features(index, length) for index, length in enumerate(lengths)]


def together(engine: Engine, seed: int, *, pieces: bool) -> list[list[int]]:
    """Run the workload, whose audio arrives whole or in pieces, at random steps among others that are aborted."""
    rng = random.Random(seed)
    requests, sent, step = workload(), dict[int, int](), 0  # sent: columns by index of the request
    ended = set[int]()
    while len(ended) < len(requests) or engine.busy:
        for index, audio in enumerate(requests):
            name, columns = f"r{index}", audio.shape[1]
            if index not in sent and rng.random() < 0.2:
                first = rng.randint(0, min(columns, 40)) if pieces else columns
                items = (audio_of(audio[:, :first]),) if first else ()
                engine.add(name, [], ALL, items=items, open=pieces)
                sent[index] = first
                ended |= set() if pieces else {index}
            elif index in sent and index not in ended and rng.random() < 0.4:
                end = min(columns, sent[index] + rng.randint(1, 90))
                items = (audio_of(audio[:, sent[index] : end]),) if end > sent[index] else ()
                last = end == columns and rng.random() < 0.5  # the end may come later than the last column
                engine.extend(name, [], items=items, last=last)
                sent[index] = end
                ended |= {index} if last else set()
        if step % 5 == 1:
            engine.add(f"aborted-{step}", [], ALL, items=(audio_of(features(step, 60)),), open=True)
        if step % 5 == 3:
            engine.abort(f"aborted-{step - 2}")
        if engine.busy:
            engine.step()
        step += 1
    for number in range(1, step, 5):
        engine.abort(f"aborted-{number}")
    engine.run()
    assert engine.blocks_used == engine.rows_used == 0
    assert not engine.core.scheduler._requests
    assert all(result.error is None for result in engine.results.values())
    assert all(engine.results[f"r{index}"].finish_reason == "stop" for index in range(len(requests)))
    return [engine.results[f"r{index}"].tokens for index in range(len(requests))]


@pytest.fixture(scope="module")
def alone(transducer_folder: Path) -> list[list[int]]:
    """The tokens of each request of the workload alone in the engine, whole."""
    engine = Engine(transducer_folder)
    outputs = [engine.generate([], ALL, items=(audio_of(audio),)).tokens for audio in workload()]
    assert len({tuple(tokens) for tokens in outputs}) > 8
    return outputs


@pytest.mark.parametrize(("schedule", "pieces"), covering(SCHEDULES, [True, False]))
def test_tokens_do_not_depend_on_the_schedule(
    transducer_folder: Path, alone: list[list[int]], schedule: str, pieces: bool
) -> None:
    assert together(Engine(transducer_folder, **SCHEDULES[schedule]), 1, pieces=pieces) == alone


@pytest.mark.parametrize("seed", slow_but(range(4), 0, 1))
def test_tokens_do_not_depend_on_the_pieces(transducer_folder: Path, alone: list[list[int]], seed: int) -> None:
    assert together(Engine(transducer_folder), seed, pieces=True) == alone


def test_text_comes_as_soon_as_a_chunk_is_complete(transducer_folder: Path) -> None:
    engine, audio = Engine(transducer_folder), features(0, 200)
    first = FACTOR * (CHUNK - 1) + 1
    engine.add("r", [], ALL, items=(audio_of(audio[:, : first - 1]),), open=True)
    engine.run()
    assert not engine.results["r"].tokens
    engine.extend("r", [], items=(audio_of(audio[:, first - 1 : first]),))
    engine.run()
    assert engine.results["r"].tokens
    frames = sum(token == BLANK for token in engine.results["r"].tokens)
    engine.extend("r", [], items=(audio_of(audio[:, first : first + FACTOR * CHUNK]),))
    engine.run()
    assert sum(token == BLANK for token in engine.results["r"].tokens) > frames
    engine.abort("r")
    engine.run()
    assert engine.blocks_used == engine.rows_used == 0


def test_memory_stays_flat_over_many_minutes(transducer_folder: Path) -> None:
    """Five minutes in pieces of 5 s: the state of the encoder, its features and the scheduler's request do not grow."""
    engine = Engine(transducer_folder, max_num_seqs=2)
    scheduler: Any = engine.core.scheduler
    audio, sizes, pieces = features(0, 500), set[int](), 60
    engine.add("r", [], ALL, open=True)
    for number in range(pieces):
        engine.extend("r", [], items=(audio_of(audio),), last=number == pieces - 1)
        engine.run()
        engine.channel.sent.clear()
        if number < pieces - 1:
            request = scheduler._requests["r"]
            assert not request.tokens
            assert sum(part.shape[1] for part in request._features) < FACTOR * CHUNK
            sizes.add(sum(map(len, (request.tokens, request.tables, request.hashes))))
    assert sizes == {0}, "what is kept grows"
    assert engine.results["r"].finish_reason == "stop"
    assert len(engine.results["r"].tokens) > 5 * 60 * 100 // FACTOR
    assert engine.blocks_used == engine.rows_used == 0


def test_states_are_limited_by_the_memory_of_encoders(transducer_folder: Path) -> None:
    """Requests without audio hold nothing; the first two with audio keep their places while they wait for more."""
    roomy = Engine(transducer_folder)
    size = roomy.info.cache_bytes // 16
    engine = Engine(transducer_folder, encoder_cache_memory=2 * size + 1)
    for name in ("no audio", "first", "second", "third"):
        engine.add(name, [], ALL, open=True)
        assert not engine.busy
    audio = features(0, 100)
    for name in ("first", "second", "third"):
        engine.extend(name, [], items=(audio_of(audio),), last=name == "third")
        engine.run()
    assert engine.results["first"].tokens == engine.results["second"].tokens
    assert engine.results["first"].tokens
    assert not engine.results["third"].tokens
    assert engine.rows_used == engine.core.scheduler.stats().blocks_used == 2
    engine.abort("first")
    engine.run()
    assert engine.results["third"].finish_reason == "stop"
    for name in ("no audio", "second"):
        engine.abort(name)
    engine.run()
    assert engine.blocks_used == engine.rows_used == 0
    assert not engine.core.scheduler._requests


def test_long_files_do_not_hold_up_live_audio(transducer_folder: Path) -> None:
    """A step has room for two pieces of the files; the live sequence has its turn in the next one."""
    engine = Engine(transducer_folder)
    for index in range(4):
        engine.add(f"file-{index}", [], ALL, items=(audio_of(features(index, 20_000)),))
    engine.add("live", [], ALL, open=True)
    engine.step()
    for number in range(3):
        before = len(engine.results["live"].tokens)
        engine.extend("live", [], items=(audio_of(features(number, FACTOR * CHUNK)),))
        for _ in range(3):
            engine.step()
        assert len(engine.results["live"].tokens) > before
    assert not any(engine.results[f"file-{index}"].finish_reason for index in range(4))


def test_a_step_that_fails_ends_one_sequence(transducer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on as if nothing had happened: their states have not read anything twice."""
    engine = Engine(transducer_folder)
    audio = {name: features(index, 500) for index, name in enumerate(("good", "bad", "other"))}
    expected = {name: engine.generate([], ALL, items=(audio_of(samples),)).tokens for name, samples in audio.items()}
    for name, samples in audio.items():
        engine.add(name, [], ALL, items=(audio_of(samples[:, :200]),), open=True)
    engine.run()
    run, decode, computed = engine.runner._run, engine.runner._decode, set[str]()

    def remember(pieces: Any, result: Any) -> None:
        computed.clear()
        computed.update(piece.request_id for piece in pieces)
        run(pieces, result)

    def fail(decodings: Any, state: Any) -> None:
        decode(decodings, state)
        if "bad" in computed:
            raise RuntimeError("no")

    monkeypatch.setattr(engine.runner, "_run", remember)
    monkeypatch.setattr(engine.runner, "_decode", fail)
    for name, samples in audio.items():
        engine.extend(name, [], items=(audio_of(samples[:, 200:]),), last=True)
    engine.run()
    assert "the model failed" in (engine.results["bad"].error or "")
    for name in ("good", "other"):
        assert engine.results[name].tokens == expected[name]
    assert engine.blocks_used == engine.rows_used == 0


def test_a_sequence_may_enter_during_a_step_with_too_little_audio_to_compute(transducer_folder: Path) -> None:
    """The plan has no audio then, but it must not be dropped: the next one has the sequence's first piece."""
    audio = [features(index, 20 * FACTOR * CHUNK) for index in range(2)]
    expected = [Engine(transducer_folder).generate([], ALL, items=(audio_of(samples),)).tokens for samples in audio]
    engine = Engine(transducer_folder, in_flight=2)
    engine.add("long", [], ALL, items=(audio_of(audio[0]),))
    assert engine.core._submit()
    engine.add("late", [], ALL, items=(audio_of(audio[1][:, :1]),), open=True)
    engine.step()
    engine.extend("late", [], items=(audio_of(audio[1][:, 1:]),), last=True)
    engine.run()
    assert [engine.results[name].tokens for name in ("long", "late")] == expected
