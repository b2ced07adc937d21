"""A request's tokens do not depend on batching, chunking, preemption, prefix hits, speculation, device or executor."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions
from quire.engine.client.sampling_params import SamplingParams
from quire.kernels import native
from tests.support.deferred import DeferredExecutor
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.invariance import SCHEDULES, VARIANTS, alone, mask, together, workload
from tests.support.models import make_model, save_model
from tests.support.threads import threads
from tests.support.variants import covering, slow_but

# One of each kind of attention and cache: plain, windowed with softcap, sinks with experts, latent, keys that change
# when a sequence has become long, and the fallback.
CASES = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "phi3-longrope", "gpt2")
# Share their attention with one of these, and differ in what chooses and scales experts.
ROUTERS = ("qwen2_moe", "deepseek_v2")


@pytest.fixture(scope="module", params=slow_but([*CASES, *ROUTERS], *CASES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = {"n_layer" if request.param == "gpt2" else "num_hidden_layers": 2}
    return save_model(make_model(request.param, **layers), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("seed", slow_but([1, 2], 1))
@pytest.mark.parametrize(
    ("folder", "schedule"), covering([*CASES, *ROUTERS], [*SCHEDULES, *VARIANTS]), indirect=["folder"]
)
def test_tokens_do_not_depend_on_the_schedule(folder: Path, schedule: str, seed: int) -> None:
    engine = Engine(folder, **{**SCHEDULES, **VARIANTS}[schedule])
    assert together(engine, workload(seed), seed) == alone(folder, seed)


@pytest.mark.parametrize("folder", slow_but([*CASES, *ROUTERS], "llama", "gpt_oss"), indirect=True)
def test_tokens_do_not_depend_on_the_number_of_threads(folder: Path) -> None:
    with threads(3):
        assert together(Engine(folder), workload(1), 1) == alone(folder, 1)


PREEMPTION: list[dict[str, Any]] = [
    {},
    {"in_flight": 2},
    {"in_flight": 3, "speculative_method": "ngram"},
    {"device": "reference"},
]


@pytest.mark.parametrize(
    ("folder", "variant"),
    [*covering(CASES, PREEMPTION), *slow_but(product(ROUTERS, PREEMPTION))],
    indirect=["folder"],
)
def test_tokens_do_not_depend_on_preemption(folder: Path, variant: dict[str, Any]) -> None:
    """The cache has so few blocks that sequences preempt each other repeatedly."""
    options = {name: value for name, value in variant.items() if name != "device"}
    model = ModelOptions(max_model_len=104, device=variant.get("device", "cpu"))
    roomy = Engine(folder, model=model, block_size=4)
    engine = Engine(
        folder,
        model=model,
        block_size=4,
        kv_cache_memory_bytes=26 * roomy.block_bytes,
        **options,
    )
    assert together(engine, workload(3), 3) == alone(folder, 3)
    assert engine.preemptions > 0


@pytest.mark.skipif(native.instructions() is None, reason="torch's products sum in another order with more rows")
@pytest.mark.parametrize("folder", slow_but(["gpt_oss", "deepseek_v3", *ROUTERS], *ROUTERS), indirect=True)
def test_bits_in_bfloat16_do_not_depend_on_the_batch(folder: Path) -> None:
    """The log probabilities of tokens are the same in a batch whose rows share experts."""
    model = ModelOptions(dtype="bfloat16")
    requests = [(random_prompt(seed, 5 + 7 * seed), greedy(12, logprobs=3)) for seed in range(5)]
    batch = Engine(folder, model=model)
    for index, request in enumerate(requests):
        batch.add(f"r{index}", *request)
    batch.run()
    single = Engine(folder, model=model)
    for index, request in enumerate(requests):
        outputs = zip(batch.results[f"r{index}"].outputs, single.generate(*request).outputs, strict=True)
        assert all(beside_others.logprobs == by_itself.logprobs for beside_others, by_itself in outputs)


def test_steps_are_submitted_before_earlier_ones_have_finished(folder: Path) -> None:
    """With a deferred executor a sequence continues to decode before its sampled tokens are known."""
    engine = Engine(folder, in_flight=2)
    prompt = random_prompt(1, 20)
    assert engine.generate(prompt, greedy(16)).tokens == Engine(folder).generate(prompt, greedy(16)).tokens
    executor = engine.core.executor
    assert isinstance(executor, DeferredExecutor)
    assert executor.most_in_flight == 2
    assert executor.steps == 16  # the prompt and 15 tokens; no step was wasted


def test_requests_aborted_while_a_step_is_in_flight_are_cleaned_up(folder: Path) -> None:
    engine = Engine(folder, in_flight=2)
    engine.add("a", random_prompt(1, 20), greedy(30))
    engine.add("b", random_prompt(2, 20), greedy(5))
    for _ in range(3):
        engine.step()
    engine.abort("a")
    # Reuses the id; pending results of the aborted request must be ignored.
    engine.add("a", random_prompt(3, 20), greedy(5))
    engine.run()
    assert engine.blocks_used == 0
    assert engine.results["a"].tokens == Engine(folder).generate(random_prompt(3, 20), greedy(5)).tokens
    assert engine.results["b"].tokens == Engine(folder).generate(random_prompt(2, 20), greedy(5)).tokens


def test_a_prefix_hit_gives_the_same_tokens(folder: Path) -> None:
    engine = Engine(folder, block_size=4)
    prompt = random_prompt(9, 50)
    first = engine.generate(prompt, greedy(16))
    again = engine.generate(prompt, greedy(16))
    assert first.outputs[0].cached_tokens == 0
    assert again.outputs[0].cached_tokens == 48
    assert again.tokens == first.tokens


SPECULATION: list[dict[str, Any]] = [{}, {"temperature": 1.2, "seed": 5}, {"repetition_penalty": 1.4, "logprobs": 2}]


@pytest.mark.parametrize(
    ("folder", "fields"),
    [*covering(CASES, SPECULATION), *slow_but(product(ROUTERS, SPECULATION))],
    indirect=["folder"],
)
def test_speculation_does_not_change_tokens(folder: Path, fields: dict[str, Any]) -> None:
    """With only three allowed tokens drafts are frequent; accepted or rejected, they do not change the tokens."""
    prompt = random_prompt(4, 6)
    params = SamplingParams(**{"max_tokens": 40, "temperature": 0.0, "allowed_tokens": mask(3, 5, 9), **fields})
    engine = Engine(folder, speculative_method="ngram", block_size=4)
    plain, speculated = Engine(folder).generate(prompt, params), engine.generate(prompt, params)
    assert speculated.tokens == plain.tokens
    assert speculated.finish_reason == plain.finish_reason
    if "logprobs" in fields:
        assert [entry.token_ids for output in speculated.outputs for entry in output.logprobs or ()] == [
            entry.token_ids for output in plain.outputs for entry in output.logprobs or ()
        ]
    assert engine.drafted > 0
    assert engine.blocks_used == 0


def test_accepted_drafts_save_steps(folder: Path) -> None:
    """With a single allowed token every draft is accepted."""
    engine = Engine(folder, speculative_method="ngram")
    result = engine.generate(random_prompt(4, 6), greedy(60, allowed_tokens=mask(7)))
    assert result.tokens == [7] * 60
    assert engine.accepted == engine.drafted > 40
    assert len(result.outputs) == 60 - engine.accepted
