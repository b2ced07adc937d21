"""--load-format dummy: models with random weights, of which only config and tokenizer are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.options import ModelOptions, ParallelOptions
from quire.engine.models.errors import UnsupportedModel
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.variants import slow_but


def folder_without_weights(case: str, tmp_path: Path) -> Path:
    folder = save_model(make_model(case), tmp_path / case)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    return folder


@pytest.mark.parametrize(
    ("case", "quantization", "ranks"),
    slow_but(
        [
            (case, quantization, ranks)
            for case in ("llama", "gemma2", "qwen3_moe", "gpt_oss", "phi")
            for quantization in ("none", "int8", "int4")
            for ranks in (1, 2)
        ],
        ("qwen3_moe", "int8", 1),
        ("llama", "none", 2),
    ),
)
def test_random_weights(case: str, quantization: str, ranks: int, tmp_path: Path) -> None:
    """They give numbers, the same ones at each start."""
    folder = folder_without_weights(case, tmp_path)
    options = ModelOptions(dtype="bfloat16", load_format="dummy", quantization=quantization)
    tokens = []
    for _ in range(2):
        engine = Engine(folder, model=options, parallel=ParallelOptions(tensor_parallel_size=ranks))
        tokens.append([engine.generate(random_prompt(seed, 9), greedy(4)).tokens for seed in range(3)])
        engine.core.close()
    assert tokens[0] == tokens[1]
    assert len(set(map(tuple, tokens[0]))) > 1


def test_what_has_no_random_weights(tmp_path: Path) -> None:
    folder = folder_without_weights("llama", tmp_path)
    options = ModelOptions(load_format="dummy", model_impl="transformers")
    with pytest.raises(UnsupportedModel, match="--load-format dummy works with Quire's own implementation only"):
        Engine(folder, model=options)
    with pytest.raises(UnsupportedModel, match="--weight-update-path does not work with --load-format dummy"):
        Engine(folder, model=ModelOptions(load_format="dummy"), weight_update_path=tmp_path)
