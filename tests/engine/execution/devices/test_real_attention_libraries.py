"""FlashAttention 2 and FlashInfer on a GPU, where they are installed, beside Quire's own kernels."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.options import ModelOptions
from quire.engine.execution.attention.libraries import LIBRARIES
from quire.engine.execution.cuda_graphs import GraphSteps
from tests.support import attention_libraries
from tests.support.attention_libraries import Calls
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.triton_device import gpu_device

pytestmark = pytest.mark.gpu

BLOCK_SIZES = {"flash_attn": 256, "flashinfer": 16}
PROMPTS = [random_prompt(1, 300), random_prompt(1, 280) + random_prompt(2, 9), random_prompt(3, 1)]


@pytest.fixture(params=BLOCK_SIZES)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    pytest.importorskip(name)
    return name


@pytest.fixture(params=["llama", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    changes: dict[str, Any] = {"head_dim": 64, "num_hidden_layers": 2, "max_position_embeddings": 768}
    return save_model(make_model(request.param, **changes), tmp_path)


def engine_of(folder: Path, backend: str, block_size: int, **options: Any) -> Engine:
    settings = {"max_num_batched_tokens": 128, "max_num_seqs": 4, "block_size": block_size, **options}
    return Engine(
        folder, device=gpu_device(), model=ModelOptions(dtype="bfloat16"), attention_backend=backend, **settings
    )


def logprobs(engine: Engine, prompt: list[int]) -> torch.Tensor:
    entries = engine.generate(prompt, greedy(1, prompt_logprobs=0)).outputs[0].prompt_logprobs
    return torch.tensor([entry.logprobs[0] for entry in entries or () if entry is not None])


def test_stand_ins_have_the_arguments_of_the_library(backend: str) -> None:
    """Of functions and constructors; a later version may have more of them, behind these."""
    real, stand_in = importlib.import_module(backend), attention_libraries.MODULES[backend](Calls())
    for name in LIBRARIES[backend].functions:
        parameters, real_parameters = (
            list(inspect.signature(getattr(module, name)).parameters) for module in (stand_in, real)
        )
        assert real_parameters[: len(parameters)] == parameters


def test_log_probabilities_are_close_to_those_of_the_own_kernels(backend: str, folder: Path) -> None:
    results = [
        [logprobs(engine_of(folder, name, BLOCK_SIZES[backend]), prompt) for prompt in PROMPTS[:2]]
        for name in (backend, "triton")
    ]
    for expected, actual in zip(*results, strict=True):
        assert (expected - actual).abs().max() < 0.2


def test_replayed_graphs_give_the_tokens_of_eager_steps(backend: str, folder: Path) -> None:
    results = []
    for eager in (True, False):
        engine = engine_of(folder, backend, BLOCK_SIZES[backend], enforce_eager=eager)
        assert isinstance(engine.runner.steps, GraphSteps) is not eager
        assert eager or len(engine.runner.steps.graphs) == 3
        results.append([engine.generate(prompt, greedy(12)).tokens for prompt in PROMPTS])
    assert results[0] == results[1]


def test_padded_sequences_have_the_log_probabilities_of_single_ones(backend: str, folder: Path) -> None:
    """Three sequences are padded to the captured size of four."""
    engine = engine_of(folder, backend, BLOCK_SIZES[backend], enable_prefix_caching=False)
    for index, prompt in enumerate(PROMPTS):
        engine.add(f"r{index}", prompt, greedy(8, logprobs=0))
    engine.run()
    for index, prompt in enumerate(PROMPTS):
        alone, batched = engine.generate(prompt, greedy(8, logprobs=0)), engine.results[f"r{index}"]
        pairs = zip(alone.outputs, batched.outputs, strict=True)
        for single, padded in pairs:
            assert single.logprobs is not None
            assert padded.logprobs is not None
            if single.token_ids != padded.token_ids:  # two tokens were almost as likely
                break
            assert abs(single.logprobs[0].logprobs[0] - padded.logprobs[0].logprobs[0]) < 0.2
