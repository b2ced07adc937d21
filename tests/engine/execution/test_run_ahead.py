"""Decode steps that follow each other before the scheduler learns of their tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.scheduling import run_ahead
from tests.support.engine import Engine, Result, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.tokenizer import VOCAB_SIZE
from tests.support.variants import slow_but

KINDS = ("llama", "lfm2", "granitemoehybrid")  # the last two have states


@pytest.fixture(scope="module", params=slow_but(KINDS, "llama", "lfm2"))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model(request.param, num_hidden_layers=2), tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def slow_steps_count_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_ahead, "_BURST", 1000.0)  # on a busy machine some take more than 60 ms


def engine_of(folder: Path, **options: Any) -> Engine:
    """With weights of which the compiled kernels replay steps."""
    return Engine(folder, model=ModelOptions(dtype="bfloat16"), **options)


def run(engine: Engine, count: int, params: SamplingParams) -> list[Result]:
    for index in range(count):
        engine.add(f"r{index}", random_prompt(index, 9 + 4 * index), params)
    engine.run()
    return [engine.results[f"r{index}"] for index in range(count)]


def tokens_of(results: list[Result]) -> list[list[int]]:
    return [result.tokens for result in results]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 1.2, "seed": 3, "top_k": 9, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.3, "logprobs": 2},
    ],
)
def test_outputs_have_several_tokens_and_they_are_the_same(folder: Path, fields: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 40, **fields})
    single, several = engine_of(folder), engine_of(folder, num_scheduler_steps=8)
    expected, results = run(single, 3, params), run(several, 3, params)
    assert tokens_of(results) == tokens_of(expected)
    assert [result.finish_reason for result in results] == [result.finish_reason for result in expected]
    assert any(len(output.token_ids) > 1 for output in results[0].outputs)
    assert all(len(output.token_ids) <= 8 for output in results[0].outputs)
    assert several.steps < single.steps / 2
    for result, other in zip(results, expected, strict=True):
        entries = [[entry for output in each.outputs for entry in output.logprobs or ()] for each in (result, other)]
        assert entries[0] == entries[1]
    assert several.blocks_used == 0


def note_native_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the number of steps is added that each native call runs."""
    decode, numbers = engine.runner.steps.decode, list[int]()

    def note(*arguments: Any, **keywords: Any) -> Any:
        tokens = decode(*arguments, **keywords)
        if tokens is not None:
            numbers.append(len(tokens[0]))
        return tokens

    monkeypatch.setattr(engine.runner.steps, "decode", note)
    return numbers


@pytest.mark.parametrize(
    ("fields", "native"),
    [
        ({}, True),
        ({"temperature": 0.8, "seed": 1, "min_p": 0.05}, True),
        ({"repetition_penalty": 1.3}, False),
        ({"logprobs": 1}, False),
        ({"logit_bias": {5: 2.0}}, False),
    ],
)
def test_further_steps_need_no_python_where_a_kernel_chooses_tokens(
    folder: Path, fields: dict[str, Any], native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(folder, num_scheduler_steps=8)
    numbers = note_native_steps(engine, monkeypatch)
    run(engine, 2, SamplingParams(**{"max_tokens": 40, "temperature": 0.0, **fields}))
    assert any(number > 1 for number in numbers) is native


@pytest.mark.parametrize(("count", "native"), [(10, True), (65, False)])
def test_a_kernel_searches_short_lists_of_stop_tokens_only(
    folder: Path, count: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens_of(run(engine_of(folder), 2, greedy(30)))
    unused = [token for token in range(VOCAB_SIZE) if not any(token in tokens for tokens in expected)]
    engine = engine_of(folder, num_scheduler_steps=8)
    numbers = note_native_steps(engine, monkeypatch)
    assert tokens_of(run(engine, 2, greedy(30, stop_token_ids=frozenset(unused[:count])))) == expected
    assert any(number > 1 for number in numbers) is native


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}])
def test_a_message_ends_further_steps(folder: Path, fields: dict[str, Any]) -> None:
    """By kernels and by Python alike, and no token is lost."""
    params = SamplingParams(max_tokens=24, temperature=0.0, **fields)
    expected = tokens_of(run(engine_of(folder), 2, params))
    reading, writing = os.pipe()
    with open(reading, "rb"), open(writing, "wb", buffering=0) as written:
        for arrived, most in ((b"", 8), (b"1", 1)):
            written.write(arrived)
            results = run(engine_of(folder, num_scheduler_steps=8, inbox=reading), 2, params)
            assert tokens_of(results) == expected
            assert max(len(output.token_ids) for result in results for output in result.outputs) == most


def test_a_sequence_ends_among_further_steps(folder: Path) -> None:
    """At any place; what the others have is the same."""
    expected = tokens_of(run(engine_of(folder), 3, greedy(30)))
    for place in range(8, 18):
        end = expected[1][place]
        until = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in expected]
        engine = engine_of(folder, num_scheduler_steps=8)
        results = run(engine, 3, greedy(30, eos_token_ids=(end,)))
        assert tokens_of(results) == until
        assert results[1].finish_reason == "stop"


@pytest.mark.parametrize("at", [3, 4, 9])
def test_a_further_step_that_fails_costs_no_token(folder: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    params = greedy(30, logprobs=0)  # which only the sampler reports, so that further steps are computed one by one
    expected = tokens_of(run(engine_of(folder), 3, params))
    engine = engine_of(folder, num_scheduler_steps=8)
    compute, calls = engine.runner._compute, 0

    def fail_once(scheduled: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise RuntimeError("broken")
        return compute(scheduled)

    monkeypatch.setattr(engine.runner, "_compute", fail_once)
    results = run(engine, 3, params)
    assert calls > at
    assert tokens_of(results) == expected
    assert engine.blocks_used == 0


def test_drafts_are_made_after_every_token(folder: Path) -> None:
    engine = engine_of(folder, num_scheduler_steps=8, speculative_method="ngram")
    assert engine.core.scheduler.limits.max_further_steps == 0
    assert tokens_of(run(engine, 2, greedy(20))) == tokens_of(run(engine_of(folder), 2, greedy(20)))
