"""A failure in one sequence ends only that sequence; the tokens of the others do not change."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.engine.client.pooling_params import PoolingParams
from quire.engine.execution import runner as runner_module
from quire.engine.execution.pooling import ChunkPooler
from quire.engine.execution.sampling import sampler as sampler_module
from quire.engine.execution.sampling.grammar import GrammarState, GrammarUsage
from quire.engine.execution.sampling.logprobs import top_logprobs
from quire.engine.execution.sampling.masks import Biases
from quire.engine.execution.sampling.penalties import Penalties
from quire.engine.execution.sampling.sampler import sample_tokens
from quire.engine.models.networks.decoder import Decoder
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model

BAD = 1.25  # parameter value for which the test raises an error


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama"), tmp_path_factory.mktemp("model"))


def run(folder: Path, bad: dict[str, Any], good: dict[str, Any], *, in_flight: int = 1) -> Engine:
    """Run two valid requests and one that fails, in common steps."""
    alone = Engine(folder, enable_prefix_caching=False)
    engine = Engine(folder, in_flight=in_flight)
    engine.add("first", random_prompt(1, 12), greedy(10, **good))
    engine.step()
    engine.add("bad", random_prompt(2, 15), greedy(10, **bad))
    engine.add("last", random_prompt(3, 9), greedy(10, **good))
    engine.run()
    for name, prompt in (("first", random_prompt(1, 12)), ("last", random_prompt(3, 9))):
        assert engine.results[name].tokens == alone.generate(prompt, greedy(10, **good)).tokens
        assert engine.results[name].finish_reason == "length"
    assert engine.blocks_used == 0
    return engine


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("method", ["add", "apply", "observe"])
def test_a_failing_sampler_stage(folder: Path, method: str, in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(Penalties, method)
    bad_rows: set[int] = set()

    def fails(self: Penalties, *arguments: Any) -> None:
        row = arguments[1] if method == "apply" else arguments[0]
        if method == "add" and arguments[1].repetition_penalty == BAD:
            raise ZeroDivisionError("injected error")
        if row in self._seen and self._seen[row].params.repetition_penalty == BAD:
            bad_rows.add(row)
            raise ZeroDivisionError("injected error")
        real(self, *arguments)

    monkeypatch.setattr(Penalties, method, fails)
    bad, good = {"repetition_penalty": BAD}, {"repetition_penalty": 1.1}
    engine = run(folder, bad, good, in_flight=in_flight)
    assert "ZeroDivisionError: injected error" in (engine.results["bad"].error or "")
    assert method == "add" or bad_rows


def test_a_failing_choice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is then sampled row by row."""

    def fails(logits: torch.Tensor, params: Any, randoms: Any) -> list[int]:
        if any(row_params.min_p == BAD / 10 for row_params in params):
            raise ZeroDivisionError("injected error")
        return sample_tokens(logits, params, randoms)

    monkeypatch.setattr(sampler_module, "sample_tokens", fails)
    engine = run(folder, {"min_p": BAD / 10}, {})
    assert "ZeroDivisionError: injected error" in (engine.results["bad"].error or "")


def test_failing_logprobs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(logits: torch.Tensor, tokens: Any, count: int, listed: Any) -> Any:
        if count == 7:
            raise ZeroDivisionError("injected error")
        return top_logprobs(logits, tokens, count, listed)

    monkeypatch.setattr(sampler_module, "top_logprobs", fails)
    engine = run(folder, {"logprobs": 7}, {"logprobs": 2})
    assert "ZeroDivisionError: injected error" in (engine.results["bad"].error or "")
    assert all(output.logprobs for output in engine.results["last"].outputs)


def test_failing_prompt_logprobs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("injected error")

    monkeypatch.setattr(runner_module, "top_logprobs", fails)
    engine = run(folder, {"prompt_logprobs": 1}, {})
    assert "ZeroDivisionError: injected error" in (engine.results["bad"].error or "")


def test_a_failing_grammar(folder: Path) -> None:
    """The thread continues with the other grammars."""

    class Compiled:
        def result(self) -> Any:
            raise ZeroDivisionError("injected error")

    state = GrammarState(Compiled())  # type: ignore[arg-type]
    mask = np.zeros(4, np.uint32)
    state.advance([], mask)
    assert state.error is not None
    assert "ZeroDivisionError: injected error" in state.error.message
    assert (mask == 0xFFFFFFFF).all()


def test_sequences_of_one_grammar_share_the_time_of_their_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Matcher:
        def deep_copy(self) -> Matcher:
            return self

        def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
            clock.append(clock[-1] + 0.1)

        def is_error(self) -> bool:
            return False

    clock, compiled = [0.0], Future[Any]()
    compiled.set_result(Matcher())
    monkeypatch.setattr(time, "thread_time", lambda: clock[-1])
    usage = GrammarUsage()
    states = [GrammarState(compiled, usage) for _ in range(64)]
    for state in states:
        state.advance([], np.zeros(4, np.uint32), 0.01)
    assert clock[-1] == pytest.approx(0.3)
    assert [state.error is None for state in states] == [True] * 2 + [False] * 62
    assert all("too expensive" in state.error.message for state in states if state.error)
    assert usage.failed


def test_the_row_of_a_failed_sequence_is_reused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(folder, max_num_seqs=1)
    with monkeypatch.context() as patch:
        patch.setattr(Biases, "apply", lambda *_: 1 / 0)
        engine.add("bad", random_prompt(1, 5), greedy(3, logit_bias={1: 2.0}))
        engine.run()
        assert "ZeroDivisionError" in (engine.results["bad"].error or "")
    assert len(engine.generate(random_prompt(1, 5), greedy(3, logit_bias={1: 2.0})).tokens) == 3


def test_pooling_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequences that share its step go on."""

    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("injected error")

    expected = Engine(folder).generate(random_prompt(1, 12), greedy(5)).tokens
    monkeypatch.setattr(ChunkPooler, "pool", fails)
    engine = Engine(folder)
    engine.add("good", random_prompt(1, 12), greedy(5))
    engine.add("bad", random_prompt(2, 15), PoolingParams(task="embed", pooling_type="mean"))
    engine.run()
    assert "ZeroDivisionError: injected error" in (engine.results["bad"].error or "")
    assert engine.results["good"].tokens == expected
    assert engine.blocks_used == 0


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_model_that_fails_for_one_sequence(folder: Path, in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequences that share its steps go on with the tokens that they would have had."""
    real = Decoder.run

    def fails(self: Decoder, inputs: Any, attend: Any, **options: Any) -> torch.Tensor:
        if (inputs.token_ids == unlucky).any():
            raise KeyError("injected error")
        return real(self, inputs, attend, **options)

    prompts = {"first": random_prompt(1, 12), "last": random_prompt(3, 40)}
    expected = {name: Engine(folder).generate(prompt, greedy(10)).tokens for name, prompt in prompts.items()}
    unlucky = next(iter(set(range(256)).difference(*prompts.values(), *expected.values())))
    monkeypatch.setattr(Decoder, "run", fails)
    engine = Engine(folder, in_flight=in_flight, block_size=8, max_num_batched_tokens=32)
    engine.add("first", prompts["first"], greedy(10))
    engine.step()
    engine.add("bad", [*range(20), unlucky, *range(9)], greedy(10))
    engine.add("last", prompts["last"], greedy(10))
    engine.run()
    assert engine.results["bad"].error == "the model failed: KeyError: 'injected error'"
    assert {name: engine.results[name].tokens for name in prompts} == expected
    assert engine.blocks_used == 0


def test_blocks_of_a_failed_step_are_not_shared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_prompt(1, 40)
    expected = Engine(folder).generate(prompt, greedy(5)).tokens
    engine = Engine(folder, block_size=8)
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "run", lambda *_, **__: dict[str, Any]()["missing"])
        for name in ("one", "same"):
            engine.add(name, prompt, greedy(5))
        engine.run()
    assert all("the model failed" in (engine.results[name].error or "") for name in ("one", "same"))
    result = engine.generate(prompt, greedy(5))
    assert result.tokens == expected
    assert result.outputs[0].cached_tokens == 0
