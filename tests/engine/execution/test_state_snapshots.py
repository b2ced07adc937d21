"""Saved states of a model: tokens are those without them."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions, ParallelOptions
from quire.engine.client.protocol import ResetCaches, RunCommand, Wake
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.recurrent import KINDS, recurrent_engine, tokens_of
from tests.support.sleep import ALL, AWAKE, answer, sleep
from tests.support.variants import covering, slow_but

BLOCK = 4
PROMPT = random_prompt(9, 50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama"), tmp_path_factory.mktemp("model"))


def turns(engine: Engine) -> list[list[int]]:
    """Chats that go on, part and begin again, some at the same time."""
    rng, prompts, out = random.Random(3), [random_prompt(seed, 40) for seed in (1, 2)], []
    for turn in range(4):
        names = [f"{turn}-{index}" for index in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            engine.add(name, prompt, greedy(10))
        engine.run()
        results = [engine.results[name].tokens for name in names]
        out += results
        more = [random_prompt(100 * turn + index, rng.randrange(1, 20)) for index in range(len(prompts))]
        parting = prompts[0][: rng.randrange(20, 40)] + random_prompt(50 + turn, 12)
        longer = [prompt + tokens + new for prompt, tokens, new in zip(prompts, results, more, strict=True)]
        prompts = [*longer[-2:], parting]
    return out


@cache
def expected(folder: Path, kind: str) -> list[list[int]]:
    return turns(recurrent_engine(folder, kind, enable_prefix_caching=False))


@pytest.mark.parametrize(
    ("kind", "schedule"),
    covering(
        KINDS,
        [
            {"block_size": BLOCK},
            {"block_size": BLOCK, "state_snapshot_memory": "40KiB", "max_num_batched_tokens": 9, "max_num_seqs": 3},
            {"block_size": BLOCK, "in_flight": 2},
            {"block_size": BLOCK, "speculative_method": "ngram", "num_speculative_tokens": 3},
        ],
    ),
)
def test_tokens_are_those_without_a_prefix_cache(folder: Path, kind: str, schedule: dict[str, Any]) -> None:
    engine = recurrent_engine(folder, kind, **schedule)
    assert turns(engine) == expected(folder, kind)
    assert any(output.cached_tokens for result in engine.results.values() for output in result.outputs)


FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": {},
    "falcon_h1": {},
    "granitemoehybrid": {},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
}


@pytest.mark.parametrize(
    ("case", "device"),
    slow_but(
        [(case, device) for case in FAMILIES for device in ("cpu", "reference")],
        *(("falcon_h1", "cpu"), ("qwen3_next", "cpu")),
    ),
)
def test_families_have_the_same_tokens_with_a_prefix_cache(tmp_path: Path, case: str, device: Any) -> None:
    folder = save_model(make_model(case, num_hidden_layers=2, **FAMILIES[case]), tmp_path)
    options = ModelOptions(device=device)
    engine = Engine(folder, model=options, block_size=BLOCK)
    assert turns(engine) == turns(Engine(folder, model=options, enable_prefix_caching=False))
    assert sum(result.outputs[0].cached_tokens for result in engine.results.values()) > 200


@pytest.mark.parametrize("flag", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_all_ranks_save_states(folder: Path, flag: str) -> None:
    parallel = ParallelOptions(**{flag: 2})
    engine = recurrent_engine(folder, "states and attention", parallel=parallel, block_size=BLOCK)
    try:
        results = [engine.generate(PROMPT, greedy(12)) for _ in range(2)]
    finally:
        engine.core.close()
    assert [result.outputs[0].cached_tokens for result in results] == [0, 48]
    assert results[0].tokens == results[1].tokens


def test_equal_prompts_that_arrive_together_are_computed_once(folder: Path) -> None:
    engine = recurrent_engine(folder, "states and attention", block_size=BLOCK, max_num_batched_tokens=32)
    for name in "abc":
        engine.add(name, PROMPT, greedy(8))
    engine.add("other", PROMPT[1:], greedy(8))
    engine.run()
    assert [engine.results[name].outputs[0].cached_tokens for name in "abc"] == [0, 48, 48]
    assert engine.results["a"].tokens == engine.results["b"].tokens == engine.results["c"].tokens


def test_other_salts_find_no_states(folder: Path) -> None:
    engine = recurrent_engine(folder, "states only", block_size=BLOCK)
    salts = ["a", "b", "a"]
    results = [engine.generate(PROMPT, greedy(4), cache_salt=salt) for salt in salts]
    assert [result.outputs[0].cached_tokens for result in results] == [0, 0, 48]


def test_no_states_are_found_after_a_reset_or_a_sleep(folder: Path) -> None:
    engine = recurrent_engine(folder, "states and windows", enable_sleep_mode=True, block_size=BLOCK)
    tokens = tokens_of(engine, PROMPT, greedy(12))

    def repeated() -> int:
        result = engine.generate(PROMPT, greedy(12))
        assert result.tokens == tokens
        return result.outputs[0].cached_tokens

    assert repeated() == 48
    engine.core._handle(RunCommand(1, ResetCaches(prefixes=True)))
    assert repeated() == 0
    assert repeated() == 48
    sleep(engine, 1)
    assert answer(engine, Wake(ALL)) == AWAKE
    assert repeated() == 0
