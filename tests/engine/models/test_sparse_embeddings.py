"""SPLADE: sparse embeddings equal those of transformers' masked language models, for every architecture."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM

from quire.engine.client.pooling_params import PoolingParams
from quire.engine.models.errors import UnsupportedModel, WeightMismatch
from tests.support.engine import Engine
from tests.support.hf_encoders import ENCODERS, assert_close, make_encoder, output, pool, random_text
from tests.support.oracle import change_weights
from tests.support.variants import slow_but

EMBED = PoolingParams(task="embed")
TEXTS = [random_text(i, length) for i, length in enumerate((1, 12, 150))]


def splade(folder: Path, **pooling: Any) -> Engine:
    """The engine of a masked language model, with the modules that sentence-transformers writes."""
    (folder / "1_SpladePooling").mkdir()
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps(pooling))
    entries = [
        {"path": "", "type": "sentence_transformers.sparse_encoder.models.MLMTransformer"},
        {"path": "1_SpladePooling", "type": "sentence_transformers.sparse_encoder.models.SpladePooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    return Engine(folder)


def expected(model: Any, text: list[int]) -> Tensor:
    values: Tensor = output(model, text).logits[0].relu().log1p().amax(0)
    return values


def assert_sparse(engine: Engine, model: Any) -> None:
    assert engine.pools.sparse
    for got, text in zip(pool(engine, TEXTS, EMBED), TEXTS, strict=True):
        assert_close(got, expected(model, text))


@pytest.mark.parametrize(
    ("case", "tied"),
    slow_but(product(ENCODERS, [True, False]), *((case, True) for case in ENCODERS), ("bert", False), ("mpnet", False)),
)
def test_every_masked_language_model(case: str, tied: bool, tmp_path: Path) -> None:
    model = make_encoder(case, AutoModelForMaskedLM, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    assert_sparse(splade(tmp_path), model)


@pytest.mark.parametrize("case", ["bert", "camembert", "mpnet", "electra", "distilbert", "gte", "nomic_bert"])
def test_activations_that_a_head_does_not_share_with_its_layers(case: str, tmp_path: Path) -> None:
    """Only some of the heads read the config's activation."""
    changes: dict[str, Any] = {"activation": "relu"} if case == "distilbert" else {"hidden_act": "relu"}
    model = make_encoder(case, AutoModelForMaskedLM, **changes)
    model.save_pretrained(tmp_path)
    assert_sparse(splade(tmp_path), model)


@pytest.mark.parametrize("bias", [True, False])
def test_biases_of_modernbert(bias: bool, tmp_path: Path) -> None:
    changes = dict.fromkeys(("decoder_bias", "classifier_bias", "norm_bias"), bias)
    model = make_encoder("modernbert", AutoModelForMaskedLM, **changes, classifier_activation="silu")
    model.save_pretrained(tmp_path)
    assert_sparse(splade(tmp_path), model)


def test_the_head_of_new_debertas(tmp_path: Path) -> None:
    """Not the one that transformers calls legacy."""
    model = make_encoder("deberta-v3", AutoModelForMaskedLM, legacy=False)
    model.save_pretrained(tmp_path)
    assert_sparse(splade(tmp_path), model)


@pytest.mark.parametrize("case", ["bert", "roberta"])
def test_a_bias_under_two_names(case: str, tmp_path: Path) -> None:
    """Old checkpoints have a second name of the bias, and of the tied weight."""
    model = make_encoder(case, AutoModelForMaskedLM)
    model.save_pretrained(tmp_path)
    head = "cls.predictions" if case == "bert" else "lm_head"
    weights = {f"{head}.decoder.weight": model.get_output_embeddings().weight.data.clone()}
    weights |= dict.fromkeys((f"{head}.decoder.bias", f"{head}.bias"), model.get_output_embeddings().bias.data)
    change_weights(tmp_path, {name: weight.clone() for name, weight in weights.items()})
    assert_sparse(splade(tmp_path), model)


def test_a_trained_output_projection(tmp_path: Path) -> None:
    """The config says that it is tied, but the checkpoint's differs: transformers reads it."""
    make_encoder("bert", AutoModelForMaskedLM).save_pretrained(tmp_path)
    weight = torch.randn(make_encoder("bert").config.vocab_size, 64)
    change_weights(tmp_path, {"cls.predictions.decoder.weight": weight})
    model = AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(model.get_output_embeddings().weight, weight)
    assert_sparse(splade(tmp_path), model)


def test_a_missing_output_projection(tmp_path: Path) -> None:
    make_encoder("bert", AutoModelForMaskedLM).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": False}))
    with pytest.raises(WeightMismatch, match="missing"):
        splade(tmp_path)


@pytest.mark.parametrize(
    ("pooling", "value"),
    [
        ({"pooling_strategy": "sum"}, lambda logits: logits.relu().log1p().sum(0)),
        ({"activation_function": "log1p_relu"}, lambda logits: logits.relu().log1p().log1p().amax(0)),
        (
            {"pooling_strategy": "sum", "activation_function": "log1p_relu"},
            lambda logits: logits.relu().log1p().log1p().sum(0),
        ),
    ],
)
def test_pooling_of_sentence_transformers(pooling: dict[str, str], value: Any, tmp_path: Path) -> None:
    model = make_encoder("bert", AutoModelForMaskedLM)
    model.save_pretrained(tmp_path)
    engine = splade(tmp_path, **pooling)
    for got, text in zip(pool(engine, TEXTS, EMBED), TEXTS, strict=True):
        assert_close(got, value(output(model, text).logits[0]))


def test_other_pooling_is_named(tmp_path: Path) -> None:
    make_encoder("bert", AutoModelForMaskedLM).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="'min' with 'relu' is not supported"):
        splade(tmp_path, pooling_strategy="min")


def test_vllms_architecture(tmp_path: Path) -> None:
    """vLLM's users name it, in the folders of models without modules."""
    model = make_encoder("bert", AutoModelForMaskedLM)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["BertSpladeSparseEmbeddingModel"]}))
    assert_sparse(Engine(tmp_path), model)
