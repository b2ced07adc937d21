"""Errors about weights name the model's folder, and the tensor as the checkpoint's architecture names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from quire.engine.models.errors import WeightMismatch
from quire.engine.models.layers.heads import PoolerHeads
from quire.engine.models.loader import _empty_model
from quire.engine.models.model_config import read_model_config
from quire.engine.models.registry import weight_names
from quire.engine.models.specs.decoder import DecoderSpec, EncoderSpec
from quire.engine.models.specs.pooler import PoolerSpec
from tests.support.engine import load
from tests.support.hf_encoders import ENCODERS, make_encoder
from tests.support.models import DECODERS, make_model
from tests.support.oracle import change_weights
from tests.support.variants import slow_but


def assert_named(folder: Path) -> None:
    """Each tensor of a checkpoint is named if it is the only one that is missing."""
    config = read_model_config(folder)
    spec = config.spec
    assert isinstance(spec, DecoderSpec | EncoderSpec)
    with torch.device("meta"):
        model = _empty_model(spec, None, torch.float32)
        model.heads = PoolerHeads(config.facts.pooler or PoolerSpec(tasks=()), spec.hidden, spec.vocab)
    names = weight_names(spec, config.facts)
    parameters = dict(model.named_parameters())
    tensors = list(load_file(folder / "model.safetensors"))
    for name in tensors:
        if (target := names.target(name, parameters)) is None or target.stacked:
            continue
        stored = names.names_of(target.parameter, target.part, [other for other in tensors if other != name])
        assert any(name.endswith(pattern) for pattern in stored), (name, stored)
        assert all("(" not in pattern and "\\" not in pattern for pattern in stored), stored


# One of each layout of weights; the others differ in what they compute.
LAYOUTS = ("bert", "mpnet", "distilbert", "modernbert", "gte", "electra", "albert", "eurobert", "jina-v3", "deberta-v2")


@pytest.mark.parametrize("case", slow_but(ENCODERS, *LAYOUTS))
def test_missing_tensors_of_encoders(case: str, tmp_path: Path) -> None:
    make_encoder(case, AutoModelForSequenceClassification, num_labels=2).save_pretrained(tmp_path)
    assert_named(tmp_path)


@pytest.mark.parametrize(
    "case", ["llama", "qwen3", "mixtral", "gemma2", "deepseek_v3", "gpt2", "opt", "falcon", "bloom"]
)
def test_missing_tensors_of_decoders(case: str, tmp_path: Path) -> None:
    assert case in DECODERS
    make_model(case).save_pretrained(tmp_path)
    assert_named(tmp_path)


@pytest.mark.parametrize(
    ("auto", "name"),
    [
        (AutoModelForSequenceClassification, "bert.encoder.layer.1.attention.self.key.weight"),
        (AutoModelForSequenceClassification, "bert.encoder.layer.3.output.LayerNorm.bias"),
        (AutoModelForSequenceClassification, "bert.embeddings.position_embeddings.weight"),
        (AutoModelForSequenceClassification, "classifier.bias"),
        (AutoModelForMaskedLM, "cls.predictions.transform.dense.weight"),
    ],
)
def test_a_missing_tensor_is_named_with_its_model(auto: Any, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    make_encoder("bert", auto).save_pretrained(folder)
    if auto is AutoModelForMaskedLM:
        (folder / "modules.json").write_text(
            '[{"type": "MLMTransformer", "path": ""}, {"type": "SpladePooling", "path": "1"}]'
        )
    change_weights(folder, {}, remove=[name])
    with pytest.raises(WeightMismatch) as caught:
        load(folder)
    message = str(caught.value)
    assert message.startswith("my-model: weights missing from the checkpoint: ")
    assert name.removeprefix("bert.") in message


def test_a_tensor_of_another_shape_is_named_with_its_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    make_encoder("bert").save_pretrained(folder)
    change_weights(folder, {"encoder.layer.0.attention.self.key.weight": torch.ones(3, 64)})
    with pytest.raises(
        WeightMismatch, match=r"my-model: encoder\.layer\.0\.attention\.self\.key\.weight has shape \(3, 64\), but"
    ):
        load(folder)
