"""Encoders in the engine: whole prompts in packed steps, without blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import BertConfig, BertModel

from quire.config.options import ModelOptions
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.execution.encoder_runner import EncoderRunner
from quire.kernels import native
from tests.support.engine import Engine, random_prompt

LENGTHS = (1, 60, 2, 17, 33, 5, 90, 8)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "num_hidden_layers": 3}
    return BertModel(BertConfig(**sizes, vocab_size=256, max_position_embeddings=128)).eval()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    model.save_pretrained(path)
    return path


def embed(engine: Engine, prompt: list[int], **fields: Any) -> NDArray[np.float32]:
    result = engine.generate(prompt, PoolingParams(task="embed"), **fields)
    assert result.pooled is not None, result.error
    return result.pooled.data


def test_embeddings_equal_hugging_face(model: Any, folder: Path) -> None:
    engine = Engine(folder)
    assert engine.info.tasks == ("embed", "token_embed", "score")
    assert engine.info.num_blocks == engine.info.cache_bytes == 0
    for length in LENGTHS:
        prompt = random_prompt(length, length)
        with torch.inference_mode():
            hidden = model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
        assert np.allclose(embed(engine, prompt), (hidden / hidden.norm()).numpy(), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_do_not_depend_on_the_batch(folder: Path, dtype: Any) -> None:
    """Bit for bit, whatever the packing."""
    options = ModelOptions(dtype=dtype)
    alone = Engine(folder, model=options)
    prompts = [random_prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    expected = [embed(alone, prompt) for prompt in prompts]
    for budget, seqs in ((512, 16), (64, 16), (100, 2)):
        engine = Engine(folder, model=options, max_num_batched_tokens=budget, max_num_seqs=seqs)
        for number, prompt in enumerate(prompts):
            engine.add(f"{number}", prompt, PoolingParams(task="embed"), flow=str(number % 2))
        engine.run()
        for number, array in enumerate(expected):
            pooled = engine.results[f"{number}"].pooled
            assert pooled is not None
            assert np.allclose(pooled.data, array, rtol=0, atol=1e-6 if dtype == "float32" else 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_do_not_depend_on_the_steps_beside_theirs(
    folder: Path, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with more steps in flight than cores, some of whose requests fail."""
    alone = Engine(folder, model=ModelOptions(dtype=dtype))
    prompts = [random_prompt(seed, 20 + seed) for seed in range(60)]
    expected = [embed(alone, prompt) for prompt in prompts]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    engine = Engine(folder, model=ModelOptions(dtype=dtype), max_num_batched_tokens=100)
    assert native.kernels is None or engine.core.executor.max_steps_in_flight == 5
    pool = EncoderRunner._pool

    def fails(self: EncoderRunner, hidden: Any, request: Any) -> Any:
        if request.request_id in ("7", "30"):
            raise ZeroDivisionError(f"injected in {request.request_id}")
        return pool(self, hidden, request)

    monkeypatch.setattr(EncoderRunner, "_pool", fails)
    for number, prompt in enumerate(prompts):
        engine.add(f"{number}", prompt, PoolingParams(task="embed"), flow=str(number % 3))
    engine.run()
    for number, array in enumerate(expected):
        result = engine.results[f"{number}"]
        if number in (7, 30):
            assert f"injected in {number}" in str(result.error)
        else:
            assert result.pooled is not None
            assert np.allclose(result.pooled.data, array, rtol=0, atol=1e-6 if dtype == "float32" else 0)
    engine.core.close()


def test_token_types_of_pairs(model: Any, folder: Path) -> None:
    prompt = random_prompt(3, 20)
    types = torch.tensor([[0] * 12 + [1] * 8])
    with torch.inference_mode():
        hidden = model(torch.tensor([prompt]), token_type_ids=types).last_hidden_state[0]
    engine = Engine(folder)
    engine.add("other", random_prompt(4, 9), PoolingParams(task="embed"))
    result = engine.generate(prompt, PoolingParams(task="token_embed", use_activation=False), second_text_start=12)
    assert result.pooled is not None
    assert np.allclose(result.pooled.data, hidden.numpy(), atol=1e-4)


def test_a_model_that_fails_ends_only_the_requests_for_which_it_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(folder)
    pool = EncoderRunner._pool

    def fails(self: EncoderRunner, hidden: Any, request: Any) -> Any:
        if request.request_id == "bad":
            raise ZeroDivisionError("injected error")
        return pool(self, hidden, request)

    monkeypatch.setattr(EncoderRunner, "_pool", fails)
    for name in ("good", "bad", "other"):
        engine.add(name, random_prompt(1, 10), PoolingParams(task="embed"))
    engine.run()
    assert "injected error" in str(engine.results["bad"].error)
    assert engine.results["good"].pooled is not None
    assert engine.results["other"].pooled is not None


def test_aborted_requests_leave_nothing(folder: Path) -> None:
    engine = Engine(folder)
    for name in "abc":
        engine.add(name, random_prompt(1, 10), PoolingParams(task="embed"))
    for name in "abc":
        engine.abort(name)
    assert not engine.busy
    assert embed(engine, [1, 2, 3]).shape == (64,)


@pytest.mark.parametrize(
    ("task", "fields", "message"),
    [
        (SamplingParams(max_tokens=3), {}, "does not generate; its tasks are embed, token_embed"),
        (PoolingParams(task="classify"), {}, "no task 'classify'; its pooling tasks are embed, token_embed"),
        (PoolingParams(task="embed", dimensions=0), {}, "dimensions must be at least 1"),
        (PoolingParams(task="embed", skip_tokens=4), {}, "skip_tokens must be from 0 to 3"),
        (PoolingParams(task="embed"), {"second_text_start": 9}, "second_text_start must be from 0 to 4"),
    ],
)
def test_invalid_requests_are_refused(folder: Path, task: Any, fields: dict[str, Any], message: str) -> None:
    engine = Engine(folder)
    assert message in str(engine.generate([1, 2, 3, 4], task, **fields).error)
    assert "the context allows at most 128" in str(engine.generate([1] * 129, PoolingParams(task="embed")).error)
    assert not engine.busy
