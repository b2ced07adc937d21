"""Layers with states: a request's tokens do not depend on the schedule, and states are never shared or lost."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config.options import ModelOptions, ParallelOptions
from quire.engine.client.protocol import Wake
from quire.engine.execution.cache import OutOfCacheMemory
from quire.engine.execution.inputs import Span
from quire.engine.execution.state_slots import StateSlots, slot_bytes
from quire.engine.execution.states import StateCaches
from quire.engine.models.layers.step import StepContext
from quire.engine.models.specs.cache import StateArray, StateCache
from quire.engine.scheduling.drafter import Drafter
from tests.support.engine import greedy, random_prompt
from tests.support.invariance import SCHEDULES, together, workload
from tests.support.models import make_model, save_model
from tests.support.recurrent import KINDS, GatedSumLayer, recurrent_engine, tokens_of
from tests.support.sleep import ALL, AWAKE, answer, sleep
from tests.support.variants import covering

BLOCK = 4
SEED = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama"), tmp_path_factory.mktemp("model"))


@cache
def alone(folder: Path, kind: str) -> list[list[int]]:
    """The tokens of each request of a workload alone in the engine, each prompt in one step."""
    engine = recurrent_engine(folder, kind)
    return [tokens_of(engine, prompt, params) for prompt, params in workload(SEED)]


@pytest.mark.parametrize(
    ("kind", "schedule"),
    covering(
        KINDS,
        [
            {},
            {"max_num_batched_tokens": 7, "max_num_seqs": 4},
            {"block_size": 3},
            SCHEDULES["without prefix caching"],
            {"in_flight": 2, "block_size": BLOCK},
            {"model": ModelOptions(device="reference"), "max_num_batched_tokens": 7, "max_num_seqs": 4},
        ],
    ),
)
def test_tokens_do_not_depend_on_the_schedule(folder: Path, kind: str, schedule: dict[str, Any]) -> None:
    engine = recurrent_engine(folder, kind, **schedule)
    assert together(engine, workload(SEED), SEED) == alone(folder, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_computed_again_after_preemption(folder: Path, kind: str) -> None:
    model = ModelOptions(max_model_len=104)
    roomy = recurrent_engine(folder, kind, model=model, block_size=BLOCK)
    scheduler: Any = roomy.core.scheduler
    needed = scheduler._tables._groups.most_blocks(104, 512, BLOCK)
    size = roomy.state_bytes + needed * (roomy.info.cache_bytes - roomy.state_bytes) // roomy.info.num_blocks
    engine = recurrent_engine(folder, kind, model=model, block_size=BLOCK, kv_cache_memory_bytes=size)
    assert together(engine, workload(SEED), SEED) == alone(folder, kind)
    assert engine.preemptions > 0 or kind == "states only"  # nothing grows there: others wait


@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_prompt_begins_with_saved_states(folder: Path, kind: str) -> None:
    """Behind the last whole block of it; without saved states nothing is found."""
    engine = recurrent_engine(folder, kind, block_size=BLOCK)
    results = [engine.generate(random_prompt(9, 50), greedy(16)) for _ in range(2)]
    assert [result.outputs[0].cached_tokens for result in results] == [0, 48]
    assert results[0].tokens == results[1].tokens
    plain = recurrent_engine(folder, kind, block_size=BLOCK, state_snapshot_memory=0)
    results = [plain.generate(random_prompt(9, 50), greedy(16)) for _ in range(2)]
    assert [result.outputs[0].cached_tokens for result in results] == [0, 0]
    assert results[0].tokens == results[1].tokens


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_depend_on_what_states_hold(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests above would compare nothing."""
    prompt = random_prompt(3, 20)
    tokens = tokens_of(recurrent_engine(folder, kind), prompt, greedy(16))
    real = GatedSumLayer.forward

    def forgets(self: GatedSumLayer, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        assert step.states is not None
        for array in step.states.arrays(self.index):
            array.zero_()
        return real(self, x, step, last_layer=last_layer)

    monkeypatch.setattr(GatedSumLayer, "forward", forgets)
    assert tokens_of(recurrent_engine(folder, kind), prompt, greedy(16)) != tokens


KIND = StateCache((StateArray((3,), "bfloat16"), StateArray((2, 5), "float32")))


def state_caches(rows: int, spare: int = 0) -> StateCaches:
    kinds = {1: KIND, 2: KIND}
    return StateCaches(StateSlots(torch.zeros(rows + spare, slot_bytes(kinds), dtype=torch.uint8), kinds), rows)


def test_states_that_are_written_are_stored_at_the_end_of_the_step() -> None:
    """Speech models write them: a step that fails changes none."""
    states = state_caches(3)
    spans = [Span(row, row, start, 1, True, False) for row, start in ((2, 5), (0, 5), (1, 0))]
    written: dict[int, list[Tensor]] = {}
    step = states.of_step(spans)
    for layer in (1, 2):
        assert not any(array.any() for array in step.read(layer))
        written[layer] = [torch.randn(3, 3).bfloat16(), torch.randn(3, 2, 5)]
        step.write(layer, written[layer])
    assert not any(array.any() for array in states.of_step(spans).read(1)), "the step has not ended"
    step.commit()
    step = states.of_step(spans)
    for layer, arrays in written.items():
        for array, in_place, expected in zip(step.read(layer), step.arrays(layer), arrays, strict=True):
            assert torch.equal(array[:2], expected[:2])
            assert not array[2].any(), "a sequence begins with zeros"
            assert torch.equal(in_place[step.slots], array)


def test_slots_of_steps_are_at_the_same_address() -> None:
    states = state_caches(3)
    first = states.of_step([Span(1, 0, 4, 2, True, False)])
    address = first.slots.data_ptr(), first.cu_seqlens.data_ptr()
    assert (first.slots.tolist(), first.cu_seqlens.tolist()) == ([1], [0, 2])
    second = states.of_step([Span(2, 0, 4, 1, True, False), Span(0, 1, 0, 5, False, False)])
    assert (second.slots.data_ptr(), second.cu_seqlens.data_ptr()) == address
    assert (second.slots.tolist(), second.cu_seqlens.tolist()) == ([2, 0], [0, 1, 6])


def test_the_states_before_a_rejected_draft_stay() -> None:
    states = state_caches(2, spare=1)
    span, drafting = Span(1, 0, 4, 1, True, True), Span(1, 0, 4, 3, True, True, (7, 8))
    states.of_step([span]).arrays(1)[1][1] = 5.0
    for accepted, expected in ((1, 5.0), (0, 5.0), (2, 9.0)):
        step = states.of_step([drafting])
        (slot,) = step.slots.tolist()
        assert (step.arrays(1)[1][slot] == 5.0).all(), "a step with a draft begins with the states before it"
        step.arrays(1)[1][slot] = 9.0
        states.check()
        states.verified(1, accepted)
        states.check()
        assert (states.of_step([span]).read(1)[1] == expected).all()
    states.of_step([drafting])  # fails
    states.of_step([drafting])
    states.removed([1])
    states.check()


def failing_steps(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Let some steps with several sequences fail after the first layer has changed states; returns how many."""
    real, failures = GatedSumLayer.forward, [0]

    def fails(self: GatedSumLayer, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        result = real(self, x, step, last_layer=last_layer)
        assert step.states is not None
        if self.index == 0 and len(step.states.ranges) > 1 and failures[0] < times:
            failures[0] += 1
            raise ZeroDivisionError("injected error")
        return result

    monkeypatch.setattr(GatedSumLayer, "forward", fails)
    return failures


@pytest.mark.parametrize("times", [1, 1000])
@pytest.mark.parametrize("kind", ["states only", "states and windows"])
def test_a_step_that_fails_changes_no_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, times: int
) -> None:
    """Its sequences are computed again from their beginning: what layers had added must not be added twice."""
    failures = failing_steps(monkeypatch, times)
    engine = recurrent_engine(folder, kind, block_size=BLOCK)
    prompts = {f"r{index}": random_prompt(index, 9 + index) for index in range(3)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, greedy(8))
    engine.run()
    assert failures[0] > 0
    plain = recurrent_engine(folder, kind)
    for name, prompt in prompts.items():
        assert engine.results[name].tokens == tokens_of(plain, prompt, greedy(8))


def test_only_the_request_ends_that_steps_fail_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = GatedSumLayer.forward

    def fails(self: GatedSumLayer, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        result = real(self, x, step, last_layer=last_layer)
        assert step.states is not None
        if self.index == 0 and any(end - begin == 13 for begin, end in step.states.ranges):
            raise ZeroDivisionError("injected error")
        return result

    monkeypatch.setattr(GatedSumLayer, "forward", fails)
    engine = recurrent_engine(folder, "states and attention", block_size=BLOCK)
    engine.add("good", random_prompt(0, 9), greedy(8))
    engine.step()
    engine.add("bad", random_prompt(1, 13), greedy(8))
    engine.add("other", random_prompt(2, 5), greedy(8))
    engine.run()
    assert "ZeroDivisionError" in (engine.results["bad"].error or "")
    plain = recurrent_engine(folder, "states and attention")
    for name, prompt in (("good", random_prompt(0, 9)), ("other", random_prompt(2, 5))):
        assert engine.results[name].tokens == tokens_of(plain, prompt, greedy(8))
    assert engine.blocks_used == 0


def guess(monkeypatch: pytest.MonkeyPatch, texts: list[list[int]]) -> None:
    """Let drafts be the next tokens of texts, with a wrong one at another place each time, or none."""

    def draft(self: Drafter, tokens: Sequence[int], room: int) -> tuple[int, ...]:
        known = list(tokens)
        text = next(text for text in texts if text[: len(known)] == known)
        guessed, wrong = text[len(known) :][: min(4, room)], len(known) % 7
        if wrong < len(guessed):
            guessed[wrong] += 1
        return tuple(guessed)

    monkeypatch.setattr(Drafter, "draft", draft)


@pytest.mark.parametrize(
    ("kind", "schedule"),
    covering(
        KINDS,
        [
            {"block_size": BLOCK},
            {"max_num_batched_tokens": 7, "max_num_seqs": 3},
            {"parallel": ParallelOptions(tensor_parallel_size=2)},
        ],
    ),
)
def test_drafts_change_no_tokens(
    folder: Path, kind: str, schedule: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are accepted as a whole, some in part, and some not at all."""
    plain = recurrent_engine(folder, kind)
    prompts = [random_prompt(seed, 5 + 11 * seed) for seed in range(4)]
    expected = [tokens_of(plain, prompt, greedy(30)) for prompt in prompts]
    guess(monkeypatch, [[*prompt, *tokens] for prompt, tokens in zip(prompts, expected, strict=True)])
    engine = recurrent_engine(folder, kind, speculative_method="ngram", **schedule)
    try:
        for index, prompt in enumerate(prompts):
            engine.add(f"r{index}", prompt, greedy(30))
        engine.run()
        assert [engine.results[f"r{index}"].tokens for index in range(4)] == expected
    finally:
        engine.core.close()
    assert 30 < engine.accepted < engine.drafted


def test_drafts_need_memory_for_a_second_state(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    kind, options = "large states", {"max_num_seqs": 1, "max_num_batched_tokens": 16, "block_size": BLOCK}
    roomy = recurrent_engine(folder, kind, speculative_method="ngram", model=ModelOptions(max_model_len=48), **options)
    size = roomy.runner._states.slots.memory.shape[1]
    with caplog.at_level(logging.WARNING):
        engine = recurrent_engine(
            folder, kind, speculative_method="ngram", kv_cache_memory_bytes=int(1.9 * size), **options
        )
    assert "--speculative-method has no effect: there is no memory for a second state" in caplog.text
    assert tokens_of(engine, [5] * 4, greedy(6)) == tokens_of(roomy, [5] * 4, greedy(6))
    assert engine.drafted == 0


def test_as_many_sequences_run_as_have_room_for_their_states(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    roomy = recurrent_engine(folder, "large states")
    size = roomy.runner._states.slots.memory.shape[1]
    with caplog.at_level(logging.INFO):
        engine = recurrent_engine(folder, "large states", kv_cache_memory_bytes=12 * size)
    assert "6 sequences run at the same time: there is no memory for the states of more" in caplog.text
    assert engine.info.cache_bytes <= 12 * size
    assert together(engine, workload(SEED), SEED) == alone(folder, "large states")
    with pytest.raises(OutOfCacheMemory, match="not enough memory for the states of one sequence"):
        recurrent_engine(folder, "large states", kv_cache_memory_bytes=size - 1)


RANKS: list[dict[str, int]] = [
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
]


@pytest.mark.parametrize(
    ("kind", "parallel", "schedule"),
    covering(KINDS, RANKS, [{}, {"max_num_batched_tokens": 7, "max_num_seqs": 4, "block_size": BLOCK}]),
)
def test_tokens_do_not_depend_on_the_ranks(
    folder: Path, kind: str, parallel: dict[str, int], schedule: dict[str, Any]
) -> None:
    """Each rank of a stage has the whole state; stages may have different numbers of layers with states."""
    engine = recurrent_engine(folder, kind, parallel=ParallelOptions(**parallel), **schedule)
    try:
        assert together(engine, workload(SEED), SEED) == alone(folder, kind)
    finally:
        engine.core.close()


def test_an_engine_with_states_sleeps_and_wakes(folder: Path) -> None:
    engine = recurrent_engine(folder, "states and windows", enable_sleep_mode=True)
    tokens = tokens_of(engine, random_prompt(1, 30), greedy(12))
    sleep(engine, 1)
    assert answer(engine, Wake(ALL)) == AWAKE
    assert tokens_of(engine, random_prompt(1, 30), greedy(12)) == tokens
