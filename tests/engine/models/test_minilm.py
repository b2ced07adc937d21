"""A real embedder, all-MiniLM-L6-v2: its embeddings are those of the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quire.config.options import ModelOptions
from quire.engine.client.pooling_params import PoolingParams
from tests.support.engine import Engine
from tests.support.minilm import MAX_TOKENS, model_folder, reference, tokenized


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder()


def check(folder: Path, count: int) -> None:
    prompts = tokenized(folder, count)
    expected = reference(folder, prompts)
    engine = Engine(folder)
    assert engine.info.max_model_len == MAX_TOKENS
    for number, prompt in enumerate(prompts):
        engine.add(f"{number}", prompt, PoolingParams(task="embed"), flow="batch")
    engine.run()
    for number, prompt in enumerate(prompts):
        pooled = engine.results[f"{number}"].pooled
        assert pooled is not None
        assert 1 - float(pooled.data @ expected[number]) < 1e-5
        assert np.abs(pooled.data - expected[number]).max() < 1e-4
        if number % 10 == 0:
            alone = engine.generate(prompt, PoolingParams(task="embed")).pooled
            assert alone is not None
            assert 1 - float(alone.data @ expected[number]) < 1e-5


def test_embeddings_are_those_of_the_reference(folder: Path) -> None:
    check(folder, 20)


@pytest.mark.slow
def test_a_thousand_embeddings_are_those_of_the_reference(folder: Path) -> None:
    check(folder, 1000)


@pytest.mark.parametrize(
    ("options", "distance"),
    [({"dtype": "bfloat16"}, 1e-3), ({"dtype": "bfloat16", "quantization": "int8"}, 2e-2)],
    ids=["bfloat16", "int8"],
)
def test_fewer_bits_give_nearly_the_same_embeddings(options: dict[str, Any], distance: float, folder: Path) -> None:
    """In fewer bytes; int8 weights and activations are computed in products of bytes."""
    prompts = tokenized(folder, 20)
    expected = reference(folder, prompts)
    engine = Engine(folder, model=ModelOptions(**options))
    for number, prompt in enumerate(prompts):
        engine.add(f"{number}", prompt, PoolingParams(task="embed"))
    engine.run()
    arrays = [engine.results[f"{number}"].pooled for number in range(len(prompts))]
    distances = [
        1 - float(array.data @ other) for array, other in zip(arrays, expected, strict=True) if array is not None
    ]
    assert len(distances) == len(prompts)
    assert 1e-7 < max(distances) < distance
    assert engine.info.weight_bytes < 0.6 * sum(tensor.nbytes for tensor in _weights(folder))


def _weights(folder: Path) -> list[torch.Tensor]:
    return list(load_file(folder / "model.safetensors").values())
