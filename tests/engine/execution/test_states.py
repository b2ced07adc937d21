"""Layers with states: a request's tokens do not depend on the schedule, and states are never shared or lost."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.config.options import ModelOptions, ParallelOptions
from quire.engine.client.protocol import Wake
from quire.engine.execution.cache import HostKVCache
from quire.engine.execution.cache_layout import CacheLayout
from quire.engine.execution.inputs import Span
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.states import StateCaches
from quire.engine.models.layers.step import StepContext
from quire.engine.models.specs.cache import CacheGroup, CacheShape, FullCache, StateArray, StateCache
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
    size = needed * roomy.info.cache_bytes // roomy.info.num_blocks
    engine = recurrent_engine(folder, kind, model=model, block_size=BLOCK, kv_cache_memory_bytes=size)
    assert together(engine, workload(SEED), SEED) == alone(folder, kind)
    assert engine.preemptions > 0 or kind == "states only"  # nothing grows there: others wait


@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_prompt_is_computed_again(folder: Path, kind: str) -> None:
    """Its keys and values may be cached, but the states behind them are not."""
    engine = recurrent_engine(folder, kind, block_size=BLOCK)
    results = [engine.generate(random_prompt(9, 50), greedy(16)) for _ in range(2)]
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
        monkeypatch.setattr(step.states, "_begins", slice(None), raising=True)
        return real(self, x, step, last_layer=last_layer)

    monkeypatch.setattr(GatedSumLayer, "forward", forgets)
    assert tokens_of(recurrent_engine(folder, kind), prompt, greedy(16)) != tokens


@pytest.mark.parametrize("dim", [3, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_states_fit_into_places_of_any_size(dim: int, dtype: torch.dtype) -> None:
    """Of smaller and larger ones, whose bytes need not be a multiple of those of an element of the state."""
    kind = StateCache((StateArray((3,), "bfloat16"), StateArray((2, 5), "float32")))
    groups = (CacheGroup(FullCache(), (0,)), CacheGroup(kind, (1, 2)))
    layout = CacheLayout({0: CacheShape(1, dim, dim, values_in_keys=True)}, groups)
    cache, count = HostKVCache(layout, 64, 3, dtype), layout.state_blocks(3, dtype)
    table = RequestTable(3, 16, 3, state_blocks=count)
    table.state_blocks[:] = np.arange(3 * count).reshape(3, count)
    states = StateCaches(cache, table, torch.device("cpu"))
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
        for array, expected in zip(step.read(layer), arrays, strict=True):
            assert torch.equal(array[:2], expected[:2])
            assert not array[2].any(), "a sequence begins with zeros"


def test_a_step_that_fails_changes_no_states(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequences are computed one by one: what the first layers had computed must not be added twice."""
    kind, real, failures = "states only", GatedSumLayer.forward, [0]

    def fails(self: GatedSumLayer, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        assert step.states is not None
        if last_layer and len(step.states.ranges) > 1:
            failures[0] += 1
            raise ZeroDivisionError("injected error")
        return real(self, x, step, last_layer=last_layer)

    monkeypatch.setattr(GatedSumLayer, "forward", fails)
    engine = recurrent_engine(folder, kind)
    prompts = {f"r{index}": random_prompt(index, 9) for index in range(3)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, greedy(8))
    engine.run()
    assert failures[0] > 0
    plain = recurrent_engine(folder, kind)
    for name, prompt in prompts.items():
        assert engine.results[name].tokens == tokens_of(plain, prompt, greedy(8))


def test_drafts_are_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A rejected one would have changed the states."""
    with caplog.at_level(logging.WARNING):
        engine = recurrent_engine(folder, "states and attention", speculative_method="ngram")
    assert "--speculative-method has no effect" in caplog.text
    plain = recurrent_engine(folder, "states and attention")
    assert tokens_of(engine, [5] * 20, greedy(20)) == tokens_of(plain, [5] * 20, greedy(20))
    assert engine.drafted == 0


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
