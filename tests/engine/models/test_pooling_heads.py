"""Labels of classifiers equal transformers', for every architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from quire.engine.client.pooling_params import PoolingParams
from quire.engine.models.errors import UnsupportedModel
from tests.support.engine import Engine
from tests.support.hf_encoders import ENCODERS, Array, assert_close, engine_of, make_encoder, output, pool, random_text

CLASSIFY = PoolingParams(task="classify")
LOGITS = PoolingParams(task="classify", use_activation=False)
TEXTS = [random_text(i, length) for i, length in enumerate((1, 40, 9, 120))]


def close(got: Array, expected: Array) -> bool:
    return bool(np.abs(got - expected).max() < 1e-4)


@pytest.mark.parametrize("case", ENCODERS)
def test_sequence_classifiers(case: str, tmp_path: Path) -> None:
    """Logits and probabilities of three labels."""
    model = make_encoder(case, AutoModelForSequenceClassification, id2label={0: "no", 1: "maybe", 2: "yes"})
    engine = engine_of(model, tmp_path)
    assert engine.pools.tasks == ("classify",)
    assert engine.pools.labels == ("no", "maybe", "yes")
    expected = [output(model, text).logits[0] for text in TEXTS]
    for got, logits in zip(pool(engine, TEXTS, LOGITS), expected, strict=True):
        assert_close(got, logits)
    for got, logits in zip(pool(engine, TEXTS, CLASSIFY), expected, strict=True):
        assert_close(got, logits.softmax(-1))


CROSS_ENCODERS = ("albert", "bert", "data2vec-text", "deberta-v3", "ernie-tasks", "eurobert", "jina-v3", "xlm-roberta")


@pytest.mark.parametrize("case", [*CROSS_ENCODERS, "xlm-roberta-xl"])
def test_cross_encoders(case: str, tmp_path: Path) -> None:
    """One label: a score of pairs, whose second text has a token type of its own where the model has two."""
    model = make_encoder(case, AutoModelForSequenceClassification, num_labels=1)
    engine = engine_of(model, tmp_path)
    assert engine.pools.tasks == ("score", "classify")
    types = case in ("albert", "bert", "ernie-tasks")
    for text in TEXTS:
        start = len(text) // 2
        logit = output(model, text, start if types else None).logits[0]
        (got,) = pool(engine, [text], PoolingParams(task="score"), second_text_start=start)
        assert_close(got, logit.sigmoid())
        (got,) = pool(engine, [text], PoolingParams(task="score", use_activation=False), second_text_start=start)
        assert_close(got, logit)


@pytest.mark.parametrize(
    ("problem", "labels", "activation"),
    [
        ("single_label_classification", 3, lambda x: x.softmax(-1)),
        ("multi_label_classification", 3, torch.sigmoid),
        ("regression", 1, lambda x: x),
        ("regression", 3, lambda x: x),
        (None, 1, torch.sigmoid),
    ],
)
def test_problem_types(problem: str | None, labels: int, activation: Any, tmp_path: Path) -> None:
    model = make_encoder("bert", AutoModelForSequenceClassification, num_labels=labels, problem_type=problem)
    engine = engine_of(model, tmp_path)
    (got,) = pool(engine, TEXTS[:1], CLASSIFY)
    assert_close(got, activation(output(model, TEXTS[0]).logits[0]))


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda x: x),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, torch.sigmoid),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, lambda x: x),
    ],
)
def test_activations_of_cross_encoders(config: dict[str, Any], activation: Any, tmp_path: Path) -> None:
    """sentence-transformers' setting, in today's and in the older form."""
    model = make_encoder("bert", AutoModelForSequenceClassification, num_labels=1, **config)
    engine = engine_of(model, tmp_path)
    logit = output(model, TEXTS[1]).logits[0]
    assert_close(pool(engine, TEXTS[1:2], PoolingParams(task="score"))[0], activation(logit))
    assert_close(pool(engine, TEXTS[1:2], PoolingParams(task="score", use_activation=False))[0], logit)


def test_other_activations_of_cross_encoders_are_named(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}
    with pytest.raises(UnsupportedModel, match="Tanh of labels is not supported"):
        engine_of(make_encoder("bert", AutoModelForSequenceClassification, num_labels=1, **changes), tmp_path)


@pytest.mark.parametrize("case", ENCODERS)
def test_token_classifiers(case: str, tmp_path: Path) -> None:
    model = make_encoder(case, AutoModelForTokenClassification, num_labels=5)
    engine = engine_of(model, tmp_path)
    assert engine.pools.tasks == ("token_classify",)
    arrays = pool(engine, TEXTS, PoolingParams(task="token_classify"))
    for got, text in zip(arrays, TEXTS, strict=True):
        assert_close(got, output(model, text).logits[0].softmax(-1))


def test_a_classifier_refuses_other_tasks(tmp_path: Path) -> None:
    engine = engine_of(make_encoder("bert", AutoModelForSequenceClassification), tmp_path)
    result = Engine.generate(engine, TEXTS[0], PoolingParams(task="token_classify"))
    assert result.error is not None
    assert "classify" in result.error


@pytest.mark.parametrize("pooling", ["bos", "mean", "late"])
def test_what_eurobert_classifies(pooling: str, tmp_path: Path) -> None:
    """The first token, the mean of all, or each of them, of which the logits are averaged."""
    model = make_encoder("eurobert", AutoModelForSequenceClassification, num_labels=3, classifier_pooling=pooling)
    engine = engine_of(model, tmp_path)
    for got, text in zip(pool(engine, TEXTS, LOGITS), TEXTS, strict=True):
        assert_close(got, output(model, text).logits[0])


def test_unknown_activations_of_heads_are_named(tmp_path: Path) -> None:
    model = make_encoder("modernbert", AutoModelForSequenceClassification, num_labels=3)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"classifier_activation": "gelu"', '"classifier_activation": "maybe"'))
    with pytest.raises(UnsupportedModel, match="activation 'maybe' is not supported"):
        Engine(tmp_path)
