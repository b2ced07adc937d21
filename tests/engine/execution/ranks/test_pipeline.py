"""The stages of a pipeline compute several steps at the same time, and the tokens are those of one rank."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from quire.config.options import ModelOptions
from quire.engine.execution.ranks.executor import ShardedExecutor
from quire.engine.execution.ranks.runner import FollowingRunner
from quire.engine.scheduling import pipeline
from quire.engine.scheduling.plan import StepPlan, StepResult
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.invariance import alone, together, workload
from tests.support.models import make_model, save_model
from tests.support.parallel import PP, TP, running
from tests.support.pieces import run_in_pieces, task
from tests.support.variants import covering, slow_but

STAGES = {"two stages": PP, "four stages": {"pipeline_parallel_size": 4}, "two stages of two ranks": {**TP, **PP}}


# Dense, with experts, and with latent attention.
CASES = ("llama", "qwen3_moe", "deepseek_v3")


@pytest.fixture(scope="module", params=slow_but(CASES, "llama"))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model(request.param), tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def few_sequences_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it makes their steps no faster."""
    monkeypatch.setattr(pipeline, "_LEAST", 1)


def steps_in_flight(engine: Engine) -> int:
    executor = engine.core.executor
    assert isinstance(executor, ShardedExecutor)
    return len(executor._in_flight)


@pytest.mark.parametrize(("folder", "stages"), covering(CASES, STAGES), indirect=["folder"])
def test_tokens_do_not_depend_on_the_number_of_stages(folder: Path, stages: str) -> None:
    with running(folder, STAGES[stages], max_num_batched_tokens=16, max_num_seqs=6, block_size=4) as engine:
        assert together(engine, workload(1), 1) == alone(folder, 1)


def test_the_first_stage_computes_while_the_second_one_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has a part of the sequences. The second stage begins when the first one has computed both steps."""
    may_compute, execute = threading.Event(), FollowingRunner.execute

    def wait_and_execute(runner: FollowingRunner, plan: StepPlan) -> StepResult:
        may_compute.wait()
        return execute(runner, plan)

    monkeypatch.setattr(FollowingRunner, "execute", wait_and_execute)
    prompts = [random_prompt(seed, 5) for seed in range(4)]
    with running(folder, PP) as engine:
        for index, prompt in enumerate(prompts):
            engine.add(f"r{index}", prompt, greedy(10))
        engine.core._submit()
        engine.core._submit()
        may_compute.set()
        assert steps_in_flight(engine) == 2
        assert [len(step.plan.scheduled) for step in engine.core._in_flight] == [2, 2]
        engine.run()
        tokens = [engine.results[f"r{index}"].tokens for index in range(4)]
    single = Engine(folder)
    assert tokens == [single.generate(prompt, greedy(10)).tokens for prompt in prompts]


def test_the_chunks_of_one_prompt_are_in_flight_together(folder: Path) -> None:
    prompt = random_prompt(1, 60)
    with running(folder, PP, max_num_batched_tokens=16) as engine:
        engine.add("long", prompt, greedy(5))
        engine.core._submit()
        engine.core._submit()
        assert steps_in_flight(engine) == 2
        assert [step.plan.scheduled[0].start for step in engine.core._in_flight] == [0, 16]
        engine.run()
        assert engine.results["long"].tokens == Engine(folder).generate(prompt, greedy(5)).tokens


def test_a_request_is_aborted_while_its_steps_are_in_flight(folder: Path) -> None:
    """Its id is used again at once."""
    other, reused = random_prompt(2, 20), random_prompt(3, 20)
    with running(folder, PP, max_num_batched_tokens=16) as engine:
        engine.add("a", random_prompt(1, 40), greedy(30))
        engine.add("b", other, greedy(12))
        for steps in (1, 2, 3, 5):
            for _ in range(steps):
                engine.step()
            engine.abort("a")
            engine.add("a", reused, greedy(8))
        engine.run()
        assert engine.blocks_used == 0
        tokens = [engine.results[name].tokens for name in "ab"]
    single = Engine(folder)
    assert tokens == [single.generate(reused, greedy(8)).tokens, single.generate(other, greedy(12)).tokens]


def test_a_preempted_sequence_gets_the_token_of_its_step_in_flight(folder: Path) -> None:
    model = ModelOptions(max_model_len=104)
    with running(folder, PP, model=model, block_size=4) as engine:
        per_block = engine.block_bytes // 2
    with running(folder, PP, model=model, block_size=4, kv_cache_memory_bytes=26 * per_block) as engine:
        assert together(engine, workload(3), 3) == alone(folder, 3)
        assert engine.preemptions > 0


def test_prompts_grow_while_their_steps_are_in_flight(tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path)
    prompts = {f"r{seed}": random_prompt(seed, 5 + 11 * seed) for seed in range(5)}
    single = Engine(folder)
    expected = {name: single.generate(prompt, task(len(prompt))).tokens for name, prompt in prompts.items()}
    for seed in range(3):
        with running(folder, PP, max_num_batched_tokens=16, max_num_seqs=4) as engine:
            run_in_pieces(engine, prompts, seed)
            assert {name: result.tokens for name, result in engine.results.items()} == expected


def test_drafts_are_verified_while_other_steps_are_in_flight(folder: Path) -> None:
    with running(folder, PP, speculative_method="ngram", num_speculative_tokens=5, block_size=4) as engine:
        assert together(engine, workload(1), 1) == alone(folder, 1)
