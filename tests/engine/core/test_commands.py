"""What an operator asks of an engine: caches are reset, and the engine pauses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.engine.client.protocol import (
    AddRequest,
    CommandDone,
    ExtendRequest,
    Pause,
    ResetCaches,
    Resume,
    RunCommand,
    StartProfile,
    StepOutput,
    StopProfile,
    UpdateWeights,
)
from quire.engine.client.step_observer import StepObserver
from tests.support.audio_models import make_audio_model, noise, prompt_with, save_audio_model
from tests.support.commands import answers, do, run
from tests.support.encoders import tiny_embedder
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.streaming_models import make_streaming_model, save_streaming_model
from tests.support.variants import slow_but
from tests.support.whisper import ENGLISH, START, TRANSCRIBE, item, make_whisper, save_whisper

PROMPT = random_prompt(1, 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama", num_hidden_layers=1), tmp_path_factory.mktemp("model"))


def cached(engine: Engine, name: str) -> int:
    """Tokens of a request's prompt that it has found in the prefix cache."""
    return engine.results[name].outputs[0].cached_tokens


def test_after_a_reset_no_prefix_is_found(folder: Path) -> None:
    engine = Engine(folder)
    before = engine.generate(PROMPT, greedy(8))
    assert engine.generate(PROMPT, greedy(8)).outputs[0].cached_tokens == 32
    do(engine, ResetCaches(prefixes=True))
    after = engine.generate(PROMPT, greedy(8))
    assert (after.tokens, after.outputs[0].cached_tokens) == (before.tokens, 0)
    assert engine.generate(PROMPT, greedy(8)).outputs[0].cached_tokens == 32


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("preempt", [False, True])
@pytest.mark.parametrize("case", slow_but(["llama", "mistral"], "mistral"))  # with a window, old blocks are not needed
def test_running_requests_go_on_and_their_blocks_are_not_found(
    tmp_path: Path, case: str, *, preempt: bool, in_flight: int
) -> None:
    folder = save_model(make_model(case, num_hidden_layers=1), tmp_path)
    expected = Engine(folder).generate(PROMPT, greedy(40)).tokens
    engine = Engine(folder, in_flight=in_flight)
    engine.add("running", PROMPT, greedy(40))
    engine.add("waiting", [3], greedy(40))
    for _ in range(12):
        engine.step()
    used = engine.blocks_used
    do(engine, ResetCaches(prefixes=True, preempt=preempt))
    engine.core.check()
    assert engine.blocks_used == (0 if preempt else used)
    for _ in range(24):  # it fills more blocks
        engine.step()
    engine.add("later", [*PROMPT, *expected[:30], 1], greedy(1))
    engine.run()
    assert engine.results["running"].tokens == expected
    # What was computed anew may be found; what was computed before, and what was appended to it, may not.
    assert cached(engine, "later") == 0 or preempt


def test_encoded_audio_is_encoded_anew(tmp_path: Path) -> None:
    engine = Engine(save_audio_model(make_audio_model("voxtral"), tmp_path), enable_prefix_caching=True)
    prompt, items = prompt_with(engine.audio, [5], noise(1, 0.4), [9])
    before = engine.generate(prompt, greedy(8), items=items).tokens
    do(engine, ResetCaches(prefixes=True))
    assert engine.generate(prompt, greedy(8), items=items).tokens == before
    assert (engine.items_encoded, engine.items_cached) == (1, 1)
    do(engine, ResetCaches(prefixes=True, items=True))
    assert engine.generate(prompt, greedy(8), items=items).tokens == before
    assert (engine.items_encoded, engine.items_cached) == (2, 1)


def test_audio_of_cross_attention_is_encoded_anew(tmp_path: Path) -> None:
    engine = Engine(save_whisper(make_whisper(), tmp_path))
    prompt = [START, ENGLISH, TRANSCRIBE]
    before = engine.generate(prompt, greedy(8), items=(item(1),)).tokens
    engine.generate(prompt, greedy(8), items=(item(1),))
    assert (engine.items_encoded, engine.items_cached) == (1, 1)
    engine.add("running", prompt, greedy(20), items=(item(1),))
    engine.step()
    do(engine, ResetCaches(items=True))
    assert engine.generate(prompt, greedy(8), items=(item(1),)).tokens == before
    assert (engine.items_encoded, engine.items_cached) == (2, 2)


def test_encoders_have_nothing_to_reset(tmp_path: Path) -> None:
    do(Engine(tiny_embedder(tmp_path)), ResetCaches(prefixes=True, items=True, preempt=True))


def test_requests_that_transcribe_while_audio_arrives_are_not_preempted(tmp_path: Path) -> None:
    engine = Engine(save_streaming_model(make_streaming_model(), tmp_path))
    do(engine, ResetCaches(prefixes=True, items=True, preempt=True))
    scheduler = engine.core.scheduler
    stats = scheduler.stats()
    stats.running = 1
    scheduler.stats = lambda plan=None: stats  # type: ignore[method-assign]
    done = run(engine, ResetCaches(prefixes=True, preempt=True))
    assert "cannot compute them anew" in str(done.error)
    assert not done.invalid


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_paused_engine_goes_on_with_the_same_tokens(folder: Path, in_flight: int) -> None:
    expected = Engine(folder).generate(PROMPT, greedy(20)).tokens
    engine = Engine(folder, in_flight=in_flight)
    engine.add("running", PROMPT, greedy(20))
    for _ in range(4):
        engine.step()
    do(engine, Pause())
    assert not engine.busy
    so_far = list(engine.results["running"].tokens)
    engine.add("new", PROMPT, greedy(20))
    assert not engine.busy
    assert engine.waiting == 1
    assert engine.results["running"].tokens == so_far
    do(engine, Pause())  # again
    do(engine, Resume())
    engine.run()
    assert engine.results["running"].tokens == engine.results["new"].tokens == expected


def test_an_engine_that_drains_answers_when_all_requests_have_ended(folder: Path) -> None:
    engine = Engine(folder)
    expected = engine.generate([1, 2, 3], greedy(5)).tokens
    engine.add("running", [1, 2, 3], greedy(5))
    engine.step()
    engine.core._handle(RunCommand(1, Pause(drain=True)))
    engine.add("new", [1, 2, 3], greedy(5))
    engine.add("given up", [1, 2, 3], greedy(5))
    engine.abort("given up")
    engine.core._end_drain()
    assert not answers(engine)
    engine.run()
    engine.core._end_drain()
    assert answers(engine) == [CommandDone(1)]
    assert engine.results["running"].tokens == expected
    assert not engine.busy
    assert not engine.results["new"].tokens
    assert engine.waiting == 1
    do(engine, Resume())
    engine.run()
    assert engine.results["new"].tokens == expected


def test_an_engine_without_requests_has_drained(folder: Path) -> None:
    engine = Engine(folder)
    engine.core._handle(RunCommand(1, Pause(drain=True)))
    engine.core._end_drain()
    assert answers(engine) == [CommandDone(1)]


@pytest.mark.parametrize("command", [Pause(), Resume()])
def test_another_command_ends_the_wait(folder: Path, command: Pause | Resume) -> None:
    engine = Engine(folder)
    engine.add("running", [1, 2, 3], greedy(5))
    engine.core._handle(RunCommand(1, Pause(drain=True)))
    engine.add("new", [1, 2, 3], greedy(5))
    engine.core._handle(RunCommand(2, command))
    first, second = answers(engine)
    assert (first.serial, second) == (1, CommandDone(2))
    assert "has ended the wait" in str(first.error)
    assert engine.busy == isinstance(command, Resume)
    do(engine, Resume())
    engine.run()
    assert engine.results["running"].tokens == engine.results["new"].tokens


def test_a_request_that_is_held_can_be_extended_within_bounds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(folder)
    expected = engine.generate([1, 2, 3, 4], greedy(5)).tokens
    engine.add("running", [1, 2, 3], greedy(5))
    engine.core._handle(RunCommand(1, Pause(drain=True)))
    for name in ("short", "long"):
        engine.add(name, [1, 2], greedy(5), open=True)
    engine.extend("short", [3, 4], last=True)
    monkeypatch.setattr("quire.engine.core.gate._MOST_BYTES", 20)
    engine.extend("long", [3, 4, 5, 6])
    assert "too much" in str(engine.results["long"].error)
    engine.core._handle(ExtendRequest("long", np.array([1], np.int32)))
    assert not [sent for sent in engine.channel.sent if isinstance(sent, StepOutput) and sent.outputs]
    engine.run()
    engine.core._end_drain()
    assert answers(engine) == [CommandDone(1)]
    do(engine, Resume())
    engine.run()
    assert engine.results["short"].tokens == expected


def test_requests_that_are_given_up_leave_room_for_what_is_appended_to_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.core.gate._MOST_BYTES", 20)
    engine = Engine(folder)
    engine.add("running", [1, 2, 3], greedy(5))
    engine.core._handle(RunCommand(1, Pause(drain=True)))
    for name in ("given up", "kept"):
        engine.add(name, [1, 2], greedy(5), open=True)
    engine.extend("given up", [3, 4, 5, 6])
    engine.abort("given up")
    engine.extend("kept", [3, 4, 5, 6], last=True)
    assert engine.results["kept"].error is None


def test_a_held_request_arrives_once_for_its_trace(folder: Path) -> None:
    engine = Engine(folder)
    arrived: list[str] = []

    class Observer(StepObserver):
        def on_add(self, message: AddRequest) -> None:
            arrived.append(message.request_id)

        def on_step(self, *_: Any) -> None:
            pass

        def on_abort(self, request_ids: Sequence[str]) -> None:
            pass

    engine.core.step_observer = Observer()
    engine.add("running", [1, 2, 3], greedy(5))
    engine.core._handle(RunCommand(1, Pause(drain=True)))
    engine.add("held", [1, 2, 3], greedy(5))
    engine.core._handle(RunCommand(2, Resume()))
    engine.run()
    assert engine.results["held"].finish_reason == "length"
    assert arrived == ["running", "held"]


def test_ids_of_held_requests_are_in_use(folder: Path) -> None:
    engine = Engine(folder)
    engine.add("running", [1, 2, 3], greedy(5))
    engine.core._handle(RunCommand(1, Pause(drain=True)))
    engine.add("new", [1, 2, 3], greedy(5))
    engine.add("new", [1, 2, 3], greedy(5))
    assert "in use" in str(engine.results["new"].error)


def test_commands_that_need_a_flag_name_it(folder: Path) -> None:
    engine = Engine(folder)
    for command, flag in (
        (UpdateWeights("x"), "--weight-update-path"),
        (StartProfile(), "--profiler-config"),
        (StopProfile(), "No profile"),
    ):
        assert flag in str(run(engine, command).error)
