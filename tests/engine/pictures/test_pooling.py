"""Language models that read pictures pool what transformers computes: embeddings, and labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from quire.config.options import ModelOptions
from quire.engine.client.pooling_params import PoolingParams
from tests.support.engine import Engine
from tests.support.pictures import drawn
from tests.support.vision_models import SEES, expected_hidden, prompt_with_pictures

FIRST, SECOND = drawn(60, 44), drawn(30, 90, seed=3)
# No picture, one, and two of different sizes with text between.
PROMPTS: list[list[Any]] = [[[5, 9, 77, 8]], [[5, 9], FIRST, [7]], [[5], SECOND, [20, 31], FIRST, [8, 101]]]
FAST = {"llava", "paligemma2", "qwen2_5_vl", "qwen3_vl"}
HEARS = {"phi4_multimodal"}  # models that read audio do not pool
CASES = [pytest.param(case, marks=() if case in FAST else pytest.mark.slow) for case in SEES if case not in HEARS]


def pictures_of(parts: list[Any]) -> list[Image.Image]:
    return [part for part in parts if isinstance(part, Image.Image)]


def pooled(engine: Engine, prompts: list[tuple[Any, Any]], params: PoolingParams) -> list[torch.Tensor]:
    """The results of prompts that run together."""
    names = [f"{params.task}-{index}" for index in range(len(prompts))]
    for name, (tokens, items) in zip(names, prompts, strict=True):
        engine.add(name, tokens, params, items=items)
    engine.run()
    results = [engine.results[name] for name in names]
    assert [result.error for result in results] == [None] * len(results)
    return [torch.from_numpy(result.pooled.data) for result in results if result.pooled is not None]


@pytest.mark.parametrize("case", CASES)
def test_embeddings_equal_transformers(
    seeing_models: dict[str, Any], seeing_folders: dict[str, Path], case: str
) -> None:
    """Of the last token and of all tokens; a batch in small chunks, whose pictures are divided and shared."""
    model = ModelOptions(convert="embed")
    step = max(11, SEES[case].least_step)
    engine = Engine(seeing_folders[case], model=model, block_size=8, max_num_batched_tokens=step, max_num_seqs=5)
    assert engine.pools.tasks == ("embed", "token_embed")
    prompts = [prompt_with_pictures(engine.pictures, *parts) for parts in PROMPTS]
    expected = [
        torch.nn.functional.normalize(expected_hidden(seeing_models[case], case, tokens, pictures_of(parts)), dim=-1)
        for (tokens, _), parts in zip(prompts, PROMPTS, strict=True)
    ]
    for actual, hidden in zip(pooled(engine, prompts, PoolingParams(task="embed")), expected, strict=True):
        torch.testing.assert_close(actual, hidden[-1], atol=1e-4, rtol=0)
    for actual, hidden in zip(pooled(engine, prompts, PoolingParams(task="token_embed")), expected, strict=True):
        torch.testing.assert_close(actual, hidden, atol=1e-4, rtol=0)


def test_labels_of_pictures(seeing_models: dict[str, Any], seeing_folders: dict[str, Path], tmp_path: Path) -> None:
    """A classifier has a linear layer in place of the language model's head."""
    folder, case = seeing_folders["qwen2_5_vl"], "qwen2_5_vl"
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight")
    head = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    save_file({**tensors, "score.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen2_5_VLForSequenceClassification"]}
    config |= {"id2label": {"0": "calm", "1": "glad", "2": "sad"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text((folder / "preprocessor_config.json").read_text())
    engine = Engine(tmp_path)
    assert engine.pools.tasks == ("classify",)
    assert engine.pools.labels == ("calm", "glad", "sad")
    prompts = [prompt_with_pictures(engine.pictures, *parts) for parts in PROMPTS]
    for (tokens, _), parts, actual in zip(
        prompts, PROMPTS, pooled(engine, prompts, PoolingParams(task="classify")), strict=True
    ):
        hidden = expected_hidden(seeing_models[case], case, tokens, pictures_of(parts))
        torch.testing.assert_close(actual, (head @ hidden[-1]).softmax(-1), atol=1e-4, rtol=0)
