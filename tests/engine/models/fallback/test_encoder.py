"""Encoders without a spec run as transformers' own code, in batches, and equal it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
)

from quire.config.options import ModelOptions
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.models.errors import UnknownArchitecture, UnsupportedModel, WeightMismatch
from quire.engine.models.fallback.encoder import Batching, TransformersEncoder
from tests.support.engine import Engine, load
from tests.support.hf_encoders import assert_close, hidden_states, make_encoder, output, pool, random_text
from tests.support.oracle import change_weights
from tests.support.variants import slow_but

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "albert-inner": ("albert", {"embedding_size": 32, "inner_group_num": 2, "pad_token_id": 0}),
    "deberta": ("deberta", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "pad_token_id": 0}),
    "deberta-conv": (
        "deberta-v2",
        {"relative_attention": True, "pos_att_type": ["p2c"], "conv_kernel_size": 3, "pad_token_id": 0},
    ),
    "deberta-absolute": ("deberta-v2", {"relative_attention": False, "pad_token_id": 0}),
    "fnet": ("fnet", {"pad_token_id": 0}),
    "longformer": ("longformer", {"attention_window": 16, "pad_token_id": 1}),
    "mobilebert": (
        "mobilebert",
        {"embedding_size": 32, "intra_bottleneck_size": 32, "pad_token_id": 0, "num_hidden_layers": 2},
    ),
    "roformer": ("roformer", {"embedding_size": 64, "pad_token_id": 0}),
}
DECODER = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "local_attention": 24,
    "global_attn_every_n_layers": 2,
}
TEXTS = [random_text(i, length) for i, length in enumerate((1, 40, 9, 120, 23, 40))]
EMBED = PoolingParams(task="embed")


def save(folder: Path, case: str, auto: Any = AutoModel, **changes: Any) -> Any:
    """A model of a case, which is written to a folder."""
    model_type, overrides = CASES[case]
    model = make_encoder(model_type, auto, **{**overrides, **changes})
    model.save_pretrained(folder)
    return model


def splade(folder: Path) -> None:
    entries = [{"path": "", "type": "MLMTransformer"}, {"path": "1_SpladePooling", "type": "SpladePooling"}]
    (folder / "modules.json").write_text(json.dumps(entries))


@pytest.mark.parametrize("case", CASES)
def test_hidden_states(case: str, tmp_path: Path) -> None:
    model = save(tmp_path, case)
    engine = Engine(tmp_path)
    assert engine.info.implementation == "transformers"
    for got, text in zip(hidden_states(engine, TEXTS), TEXTS, strict=True):
        assert_close(got, output(model, text)[0][0])
    (got,) = pool(engine, [TEXTS[3]], EMBED)
    assert_close(got, F.normalize(output(model, TEXTS[3])[0][0].mean(0), dim=-1))


@pytest.mark.parametrize("case", CASES)
def test_classifiers(case: str, tmp_path: Path) -> None:
    model = save(tmp_path, case, AutoModelForSequenceClassification, num_labels=3)
    engine = Engine(tmp_path)
    assert engine.info.tasks == ("classify",)
    for got, text in zip(pool(engine, TEXTS, PoolingParams(task="classify")), TEXTS, strict=True):
        assert_close(got, output(model, text).logits[0].softmax(-1))


@pytest.mark.parametrize("case", slow_but(CASES, "deberta", "longformer", "mobilebert"))
def test_token_classifiers(case: str, tmp_path: Path) -> None:
    model = save(tmp_path, case, AutoModelForTokenClassification, num_labels=3)
    engine = Engine(tmp_path)
    assert engine.info.tasks == ("token_classify",)
    for got, text in zip(pool(engine, TEXTS, PoolingParams(task="token_classify")), TEXTS, strict=True):
        assert_close(got, output(model, text).logits[0].softmax(-1))


@pytest.mark.parametrize("case", CASES)
def test_sparse_embeddings(case: str, tmp_path: Path) -> None:
    model = save(tmp_path, case, AutoModelForMaskedLM)
    splade(tmp_path)
    engine = Engine(tmp_path)
    for got, text in zip(pool(engine, TEXTS, EMBED), TEXTS, strict=True):
        assert_close(got, output(model, text).logits[0].relu().amax(0).log1p())


@pytest.mark.parametrize("case", ["deberta", "mobilebert", "longformer", "deberta-conv"])
def test_rerankers(case: str, tmp_path: Path) -> None:
    """Pairs have scores; their second texts have a token type of their own where the model reads one."""
    model = save(tmp_path, case, AutoModelForSequenceClassification, num_labels=1, type_vocab_size=2)
    engine = Engine(tmp_path)
    assert engine.info.tasks == ("score", "classify")
    for text in TEXTS[1:]:
        (got,) = pool(engine, [text], PoolingParams(task="score"), second_text_start=5)
        assert_close(got, output(model, text, 5).logits[0].sigmoid())


def test_a_decoder_with_labels(tmp_path: Path) -> None:
    model = make_encoder("modernbert-decoder", AutoModelForSequenceClassification, **DECODER, num_labels=3)
    model.save_pretrained(tmp_path)
    for got, text in zip(pool(Engine(tmp_path), TEXTS, PoolingParams(task="classify")), TEXTS, strict=True):
        assert_close(got, output(model, text).logits[0].softmax(-1))


def test_the_encoder_of_t5(tmp_path: Path) -> None:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    model = make_encoder("t5", AutoModelForTextEncoding, **sizes)
    model.save_pretrained(tmp_path)
    for got, text in zip(hidden_states(Engine(tmp_path), TEXTS), TEXTS, strict=True):
        assert_close(got, output(model, text)[0][0])


@pytest.mark.parametrize(("case", "batching"), [("deberta", Batching.PADDED), ("fnet", Batching.EQUAL_LENGTHS)])
def test_texts_run_together_where_padding_changes_nothing(case: str, batching: Batching, tmp_path: Path) -> None:
    """FNet mixes all positions, those of padding too."""
    save(tmp_path, case)
    model = load(tmp_path).model
    assert isinstance(model, TransformersEncoder)
    assert model.batching is batching


@pytest.mark.parametrize("case", slow_but(CASES, "deberta-conv", "fnet", "longformer"))
def test_neighbours_change_nothing_but_rounding(case: str, tmp_path: Path) -> None:
    save(tmp_path, case)
    engine = Engine(tmp_path)
    together = pool(engine, TEXTS, EMBED)
    for array, text in zip(together, TEXTS, strict=True):
        (alone,) = pool(engine, [text], EMBED)
        assert np.abs(array - alone).max() < 1e-5


def test_the_longest_text(tmp_path: Path) -> None:
    """Positions of Longformer begin after the padding token's."""
    model = save(tmp_path, "longformer")
    engine = Engine(tmp_path)
    assert engine.info.max_model_len == 254
    text = random_text(1, 254)
    assert_close(hidden_states(engine, [text])[0], output(model, text)[0][0])


def test_modules_of_sentence_transformers(tmp_path: Path) -> None:
    model = save(tmp_path, "deberta")
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    (tmp_path / "1" / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    dense = {"in_features": 64, "out_features": 16, "bias": False}
    (tmp_path / "2" / "config.json").write_text(json.dumps(dense))
    weight = torch.randn(16, 64)
    save_file({"linear.weight": weight}, tmp_path / "2" / "model.safetensors")
    names = (("Transformer", ""), ("Pooling", "1"), ("Dense", "2"))
    (tmp_path / "modules.json").write_text(json.dumps([{"type": kind, "path": path} for kind, path in names]))
    (got,) = pool(Engine(tmp_path), [TEXTS[1]], EMBED)
    assert_close(got, F.linear(output(model, TEXTS[1])[0][0, 0], weight))


def test_transformers_runs_any_encoder_that_is_asked_to(tmp_path: Path) -> None:
    model = make_encoder("bert")
    model.save_pretrained(tmp_path)
    engine = Engine(tmp_path, model=ModelOptions(model_impl="transformers"))
    assert engine.info.implementation == "transformers"
    assert_close(hidden_states(engine, TEXTS[1:2])[0], output(model, TEXTS[1])[0][0])


def test_a_head_that_is_not_needed_may_be_in_the_checkpoint(tmp_path: Path) -> None:
    model = save(tmp_path, "deberta", AutoModelForMaskedLM)
    assert_close(hidden_states(Engine(tmp_path), TEXTS[1:2])[0], output(model.deberta, TEXTS[1])[0][0])


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    save(tmp_path / "missing", "deberta")
    change_weights(tmp_path / "missing", {}, remove=["encoder.layer.1.output.dense.weight"])
    with pytest.raises(
        WeightMismatch, match=r"missing: weights missing from the checkpoint: encoder\.layer\.1\.output"
    ):
        load(tmp_path / "missing")
    save(tmp_path / "extra", "deberta")
    change_weights(tmp_path / "extra", {"encoder.layer.1.adapter.weight": torch.ones(3)})
    with pytest.raises(
        WeightMismatch, match=r"extra: unexpected weights in the checkpoint: encoder\.layer\.1\.adapter"
    ):
        load(tmp_path / "extra")
    save(tmp_path / "shape", "deberta")
    change_weights(tmp_path / "shape", {"encoder.layer.1.output.dense.weight": torch.ones(3, 3)})
    with pytest.raises(
        WeightMismatch, match=r"shape: encoder\.layer\.1\.output\.dense\.weight has shape \(3, 3\), but"
    ):
        load(tmp_path / "shape")


def test_a_model_that_reads_images_is_refused(tmp_path: Path) -> None:
    make_encoder("vit", num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UnknownArchitecture, match="ViTModel does not read text"):
        load(tmp_path)


def test_a_model_that_fails_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Nyström's landmarks must divide the length of a text."""
    make_encoder("nystromformer", segment_means_seq_len=8, num_landmarks=4, pad_token_id=0).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="transformers cannot run it on a text: RuntimeError"):
        load(tmp_path)


def test_quantization_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "deberta")
    with pytest.raises(UnsupportedModel, match="--quantization works with"):
        load(tmp_path, quantization="int8", dtype="float32")


def test_a_model_whose_code_mixes_dtypes_is_computed_in_float32(tmp_path: Path) -> None:
    """If the user has not chosen a dtype."""
    model = make_encoder("deberta", relative_attention=True, pos_att_type=["c2p"], position_biased_input=True)
    model.bfloat16().save_pretrained(tmp_path)
    assert load(tmp_path, dtype="auto").dtype == torch.float32
    with pytest.raises(UnsupportedModel, match="dtype"):
        load(tmp_path, dtype="bfloat16")
