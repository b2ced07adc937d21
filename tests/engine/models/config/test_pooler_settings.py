"""--pooler-config: each of vLLM's settings has its effect, and others are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from quire.config.options import ModelOptions
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.models.config.pooler_settings import read_pooler_settings
from quire.engine.models.errors import UnsupportedModel
from tests.support.engine import Engine
from tests.support.hf_encoders import assert_close, make_encoder, output, pool, random_text
from tests.support.models import make_model

EMBED = PoolingParams(task="embed")
TEXTS = [random_text(i, length) for i, length in enumerate((5, 40))]


def engine(folder: Path, **settings: Any) -> Engine:
    return Engine(folder, model=ModelOptions(pooler_config=settings))


def embedder(folder: Path, **changes: Any) -> Any:
    model = make_encoder("bert")
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return model


@pytest.mark.parametrize("name", ["pooling_type", "seq_pooling_type"])
@pytest.mark.parametrize(("kind", "row"), [("CLS", 0), ("LAST", -1)])
def test_the_pooling_of_texts(name: str, kind: str, row: int, tmp_path: Path) -> None:
    model = embedder(tmp_path)
    settings = {name: kind, "use_activation": False, "tok_pooling_type" if name != "pooling_type" else "task": None}
    for got, text in zip(pool(engine(tmp_path, **settings), TEXTS, EMBED), TEXTS, strict=True):
        assert_close(got, output(model, text).last_hidden_state[0, row])


def test_a_task(tmp_path: Path) -> None:
    embedder(tmp_path)
    assert engine(tmp_path, task="embed").pools.tasks == ("embed", "token_embed")
    with pytest.raises(UnsupportedModel, match="classify"):
        engine(tmp_path, task="classify")
    with pytest.raises(UnsupportedModel, match="task embed differs from --task token_embed"):
        Engine(tmp_path, model=ModelOptions(task="token_embed", pooler_config={"task": "embed"}))


def test_dimensions_are_those_of_requests_that_do_not_say(tmp_path: Path) -> None:
    model = embedder(tmp_path, matryoshka_dimensions=[16, 32])
    shortened = engine(tmp_path, dimensions=16)
    mean = output(model, TEXTS[0]).last_hidden_state[0].mean(0)
    assert_close(pool(shortened, TEXTS[:1], EMBED)[0], F.normalize(mean[:16], dim=-1))
    assert_close(
        pool(shortened, TEXTS[:1], PoolingParams(task="embed", dimensions=32))[0], F.normalize(mean[:32], dim=-1)
    )
    with pytest.raises(UnsupportedModel, match="dimensions does not apply: the model's are 16, 32"):
        engine(tmp_path, dimensions=17)
    embedder(tmp_path, is_matryoshka=True)
    with pytest.raises(UnsupportedModel, match="dimensions does not apply: the model's embeddings have 64 values"):
        engine(tmp_path, dimensions=65)


@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_calibrated_logits(auto: Any, tmp_path: Path) -> None:
    """Before the activation, and without it, too."""
    model = make_encoder("bert", auto, num_labels=3)
    model.save_pretrained(tmp_path)
    calibrated = engine(tmp_path, logit_mean=0.5, logit_sigma=4)
    task = calibrated.pools.tasks[0]
    for activates in (None, False):
        params = PoolingParams(task=task, use_activation=activates)
        logits = (output(model, TEXTS[1]).logits[0] - 0.5) / 4
        (got,) = pool(calibrated, TEXTS[1:], params)
        assert_close(got, logits if activates is False else logits.softmax(-1))


@pytest.mark.parametrize("max_num_batched_tokens", [512, 16])
def test_steps_of_a_reward_model(max_num_batched_tokens: int, tmp_path: Path) -> None:
    """The logits of two tokens of a language model, where a step ends (Math-Shepherd); prompts may come in chunks."""
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    text = [7, 9, 250, *TEXTS[1], 250, 8, 250]
    settings = {"tok_pooling_type": "STEP", "step_tag_id": 250, "returned_token_ids": [11, 12]}
    options: dict[str, Any] = {"block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": max_num_batched_tokens}
    steps = Engine(tmp_path, model=ModelOptions(pooler_config=settings), **options)
    assert steps.pools.tasks == ("token_classify",)
    (got,) = pool(steps, [text], PoolingParams(task="token_classify"))
    rows = torch.tensor([i for i, token in enumerate(text) if token == 250])
    assert_close(got, output(model, text).logits[0][rows][:, [11, 12]].softmax(-1))
    (none,) = pool(steps, [TEXTS[0]], PoolingParams(task="token_classify"))
    assert none.shape == (0, 2)


def test_steps_of_an_encoder(tmp_path: Path) -> None:
    model = make_encoder("bert", AutoModelForTokenClassification, num_labels=3)
    model.save_pretrained(tmp_path)
    text = [9, 250, 8, 250]
    (got,) = pool(
        engine(tmp_path, tok_pooling_type="STEP", step_tag_id=250),
        [text],
        PoolingParams(task="token_classify"),
    )
    assert_close(got, output(model, text).logits[0][[1, 3]].softmax(-1))


def test_chunks_are_for_the_front_end(tmp_path: Path) -> None:
    embedder(tmp_path)
    chunking = engine(tmp_path, enable_chunked_processing=True, max_embed_len=3072000)
    assert chunking.pools.chunked
    assert chunking.pools.max_embed_len == 3072000
    assert chunking.info.max_model_len == 256


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"normalize": True}, "normalize was removed from vLLM's PoolerConfig; use use_activation"),
        ({"logit_bias": 1}, "use logit_mean"),
        ({"median": 1}, "median is not supported; supported are task, pooling_type"),
        ({"pooling_type": "median"}, "pooling_type must be one of"),
        ({"pooling_type": "CLS", "seq_pooling_type": "CLS"}, "pooling_type and seq_pooling_type cannot both be set"),
        ({"seq_pooling_type": "ALL"}, "seq_pooling_type must be one of"),
        ({"tok_pooling_type": "CLS"}, "tok_pooling_type must be one of ALL, STEP"),
        ({"use_activation": 1}, "use_activation must be true or false, not 1"),
        ({"dimensions": 0}, "dimensions must be an integer from 1"),
        ({"max_embed_len": "x"}, "max_embed_len must be an integer"),
        ({"logit_sigma": 0}, "logit_sigma must not be 0"),
        ({"logit_mean": float("nan")}, "logit_mean must be a finite number"),
        ({"step_tag_id": 4}, "step_tag_id needs the tok_pooling_type STEP"),
        ({"returned_token_ids": [-1]}, "returned_token_ids must be a list"),
        ({"task": "plan"}, "task must be one of"),
        ({"enable_flash_late_interaction": 3}, "enable_flash_late_interaction must be true or false"),
    ],
)
def test_settings_that_are_wrong(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_pooler_settings(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_chunked_processing": True}, "enable_chunked_processing does not apply: the model has no dense"),
        ({"max_embed_len": 10}, "max_embed_len does not apply"),
        ({"tok_pooling_type": "STEP"}, "tok_pooling_type STEP does not apply: the model has no results of tokens"),
        ({"dimensions": 8}, "dimensions does not apply: the model has no Matryoshka embeddings"),
        ({"returned_token_ids": [3]}, "returned_token_ids does not apply"),
    ],
)
def test_settings_that_do_not_apply_to_a_classifier(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_encoder("bert", AutoModelForSequenceClassification, num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=message):
        engine(tmp_path, **settings)


def test_settings_that_do_not_apply_to_an_embedder(tmp_path: Path) -> None:
    embedder(tmp_path)
    with pytest.raises(UnsupportedModel, match="logit_mean does not apply: the model has no labels"):
        engine(tmp_path, logit_mean=1)
    with pytest.raises(UnsupportedModel, match="token id 300 is not in the vocabulary of 261"):
        engine(tmp_path, tok_pooling_type="STEP", step_tag_id=300)


def test_settings_of_a_model_that_generates_are_refused(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="the model generates; --convert embed makes it pool"):
        engine(tmp_path, pooling_type="LAST")


def test_padding_has_the_token_type_of_first_texts(tmp_path: Path) -> None:
    """As transformers' tokenizers write it."""
    model = make_encoder("bert", AutoModelForSequenceClassification, num_labels=1)
    model.save_pretrained(tmp_path)
    text = [*TEXTS[1][:12], 0, 0, 0]
    types = torch.tensor([[0] * 5 + [1] * 7 + [0] * 3])
    with torch.inference_mode():
        logit = model(torch.tensor([text]), token_type_ids=types).logits[0]
    fields = {"second_text_start": 5, "second_text_end": 12}
    (got,) = pool(Engine(tmp_path), [text], PoolingParams(task="score"), **fields)
    assert_close(got, logit.sigmoid())
    assert np.isfinite(got).all()
