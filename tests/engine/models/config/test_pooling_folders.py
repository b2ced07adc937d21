"""Folders that pool: sentence-transformers' modules, decoders as embedders, classifiers and rerankers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from quire.config.options import ModelOptions
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from tests.support.engine import Engine, load
from tests.support.hf_encoders import assert_close, hidden_states, make_encoder, output, pool, random_text
from tests.support.models import BASE, DECODERS, draw_weights, make_model, save_model
from tests.support.tokenizer import write_tokenizer

EMBED = PoolingParams(task="embed")
PREFIX = "sentence_transformers.models"


def decoder(model_type: str, auto: Any = AutoModel, **changes: Any) -> Any:
    """A decoder of transformers without its language model head, or with another one."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**BASE, **changes})
    model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    draw_weights(model, model_type)
    return model


def add_modules(folder: Path, *modules: tuple[str, dict[str, Any]]) -> None:
    """Write modules.json, and a folder with a config for each module after the transformer."""
    entries = [{"idx": 0, "name": "0", "path": "", "type": f"{PREFIX}.Transformer"}]
    for index, (kind, config) in enumerate(modules, 1):
        inner = folder / f"{index}_{kind}"
        inner.mkdir()
        (inner / "config.json").write_text(json.dumps(config))
        entries.append({"idx": index, "name": str(index), "path": inner.name, "type": f"{PREFIX}.{kind}"})
    (folder / "modules.json").write_text(json.dumps(entries))


@pytest.mark.parametrize(
    ("config", "pooled"),
    [
        ({"pooling_mode_cls_token": True}, lambda h: h[0]),
        ({"pooling_mode_mean_tokens": True}, lambda h: h.mean(0)),
        ({"pooling_mode_max_tokens": True}, lambda h: h.amax(0)),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, lambda h: h.sum(0) / len(h) ** 0.5),
        ({"pooling_mode_lasttoken": True}, lambda h: h[-1]),
        (
            {"pooling_mode_weightedmean_tokens": True},
            lambda h: (h * torch.arange(1, len(h) + 1)[:, None]).sum(0) / (len(h) * (len(h) + 1) / 2),
        ),
        ({"pooling_mode": "mean"}, lambda h: h.mean(0)),
    ],
)
def test_pooling_modes(config: dict[str, Any], pooled: Any, tmp_path: Path) -> None:
    model = make_encoder("bert")
    model.save_pretrained(tmp_path)
    add_modules(tmp_path, ("Pooling", config))
    engine, text = Engine(tmp_path), random_text(1, 20)
    assert_close(pool(engine, [text], EMBED)[0], pooled(output(model, text).last_hidden_state[0]))


def test_dense_layers_and_normalization(tmp_path: Path) -> None:
    model = make_encoder("bert")
    model.save_pretrained(tmp_path)
    dense = {"in_features": 64, "out_features": 24, "activation_function": "torch.nn.modules.activation.Tanh"}
    add_modules(tmp_path, ("Pooling", {"pooling_mode_mean_tokens": True}), ("Dense", dense), ("Normalize", {}))
    weight, bias = torch.randn(24, 64), torch.randn(24)
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense" / "model.safetensors")
    engine, text = Engine(tmp_path), random_text(1, 20)
    assert engine.pools.embedding_size == 24
    hidden = torch.tanh(F.linear(output(model, text).last_hidden_state[0].mean(0), weight, bias))
    assert_close(pool(engine, [text], EMBED)[0], F.normalize(hidden, dim=0))
    cut = pool(engine, [text], PoolingParams(task="embed", dimensions=8))[0]
    assert_close(cut, F.normalize(hidden[:8], dim=0))
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(BrokenFolder, match="2_Dense"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ([("Pooling", {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True})], "cls and max"),
        ([("Pooling", {"pooling_mode_mean_tokens": True}), ("CNN", {})], "'CNN'"),
        ([("Pooling", {"pooling_mode_mean_tokens": True}), ("Dense", {"activation_function": "x.Odd"})], "'odd'"),
    ],
)
def test_modules_that_are_not_supported_are_named(modules: Any, reason: str, tmp_path: Path) -> None:
    make_encoder("bert").save_pretrained(tmp_path)
    add_modules(tmp_path, *modules)
    with pytest.raises(UnsupportedModel, match=reason):
        load(tmp_path)


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "mistral", "gemma3_text"])
def test_decoders_embed_by_their_last_token(model_type: str, tmp_path: Path) -> None:
    """Without a head in the checkpoint, with chunks and prefix hits."""
    model = decoder(model_type, head_dim=16)
    model.save_pretrained(tmp_path)
    add_modules(tmp_path, ("Pooling", {"pooling_mode_lasttoken": True}), ("Normalize", {}))
    text = random_text(3, 60)
    last = output(model, text).last_hidden_state[0, -1]
    for budget in (512, 16):
        engine = Engine(tmp_path, block_size=8, max_num_batched_tokens=budget)
        assert engine.pools.tasks == ("embed", "token_embed")
        for _ in range(2):
            assert_close(pool(engine, [text], EMBED)[0], last / last.norm())


def test_a_language_model_embeds_if_told_to(tmp_path: Path) -> None:
    model = make_model("llama")
    save_model(model, tmp_path)
    assert Engine(tmp_path).info.tasks == ("generate",)
    options = ModelOptions(task="embed", pooler_config={"pooling_type": "MEAN", "use_activation": False})
    engine, text = Engine(tmp_path, model=options), random_text(1, 30)
    mean = output(model.model, text).last_hidden_state[0].mean(0)
    assert_close(pool(engine, [text], EMBED)[0], mean)


@pytest.mark.parametrize("name", ["LAST", "CLS", "MEAN", "MAX", "MEAN_SQRT_LEN", "WEIGHTED_MEAN", "weightedmean"])
def test_pooler_config_names_every_kind_of_pooling(tmp_path: Path, name: str) -> None:
    model = make_model("llama")
    save_model(model, tmp_path)
    options = ModelOptions(task="embed", pooler_config={"pooling_type": name, "use_activation": False})
    engine, text = Engine(tmp_path, model=options), random_text(1, 30)
    hidden = output(model.model, text).last_hidden_state[0]
    weights = torch.arange(1.0, len(hidden) + 1)[:, None]
    expected = {
        "LAST": hidden[-1],
        "CLS": hidden[0],
        "MEAN": hidden.mean(0),
        "MAX": hidden.amax(0),
        "MEAN_SQRT_LEN": hidden.sum(0) / len(hidden) ** 0.5,
        "WEIGHTED_MEAN": (hidden * weights).sum(0) / weights.sum(),
        "weightedmean": (hidden * weights).sum(0) / weights.sum(),
    }
    assert_close(pool(engine, [text], EMBED)[0], expected[name])


def test_pooler_config_refuses_other_kinds(tmp_path: Path) -> None:
    save_model(make_model("llama"), tmp_path)
    options = ModelOptions(task="embed", pooler_config={"pooling_type": "median"})
    with pytest.raises(UnsupportedModel, match=r"pooling_type must be one of LAST, MEAN, CLS, MAX.* not 'median'"):
        Engine(tmp_path, model=options)


def test_gemma_that_attends_in_both_directions(tmp_path: Path) -> None:
    changes = {"use_bidirectional_attention": True, "sliding_window": 24, "head_dim": 16, "num_hidden_layers": 7}
    model = decoder("gemma3_text", **changes)
    model.save_pretrained(tmp_path)
    engine = Engine(tmp_path)
    texts = [random_text(length, length) for length in (1, 9, 70)]
    for got, text in zip(hidden_states(engine, texts), texts, strict=True):
        assert_close(got, output(model, text).last_hidden_state[0])


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("mistral", {}),
        ("qwen2-windowed", {}),
        ("gemma2", {}),
        ("gemma3", {}),
        ("gemma3", {"use_bidirectional_attention": True}),
        ("gpt_neox", {}),
        ("gptj", {}),
        ("phi", {}),
        ("llama-dynamic", {}),
        ("phi3-longrope", {}),
    ],
)
def test_decoders_with_is_causal_false(case: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Their windows reach one token further than those of causal attention; ropes that depend on the length of a text
    limit it to the length of the training."""
    model_type, overrides = DECODERS[case]
    model = decoder(model_type, AutoModelForCausalLM, **overrides, is_causal=False, **changes)
    model.save_pretrained(tmp_path)
    engine = Engine(tmp_path)
    texts = [random_text(length, length) for length in (1, 9, min(70, engine.info.max_model_len))]
    for got, text in zip(hidden_states(engine, texts), texts, strict=True):
        assert_close(got, output(model.base_model, text).last_hidden_state[0])


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("gpt_neo", {"is_causal": False}, "is_causal false is not supported in models of type 'gpt_neo'"),
        ("gpt_oss", {"is_causal": False}, "attention sinks in both directions"),
        ("bloom", {"is_causal": False}, "ALiBi in both directions"),
        ("deepseek_v3", {"is_causal": False}, r"latent attention \(MLA\) in both directions"),
    ],
)
def test_both_directions_that_are_not_supported(
    case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model_type, overrides = DECODERS[case]
    decoder(model_type, AutoModelForCausalLM, **overrides, **changes).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=message):
        Engine(tmp_path)


def test_a_flag_that_transformers_does_not_read_in_a_family_has_no_effect(tmp_path: Path) -> None:
    save_model(make_model("llama", use_bidirectional_attention=True), tmp_path)
    assert Engine(tmp_path).info.tasks == ("generate",)


def test_a_decoder_that_attends_in_both_directions_needs_no_head(tmp_path: Path) -> None:
    """As GTE-Qwen2, whose checkpoint has the head of a language model."""
    model = decoder("qwen2", AutoModelForCausalLM, is_causal=False, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    engine, text = Engine(tmp_path), random_text(1, 30)
    assert engine.pools.tasks == ("embed", "token_embed")
    assert_close(hidden_states(engine, [text])[0], output(model.model, text).last_hidden_state[0])
    with pytest.raises(UnsupportedModel, match="cannot generate"):
        Engine(tmp_path, model=ModelOptions(task="generate"))


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "gpt2", "gemma2"])
def test_decoders_with_a_score_head(model_type: str, tmp_path: Path) -> None:
    changes = {"n_embd": 64, "n_layer": 2, "n_head": 4} if model_type == "gpt2" else {"head_dim": 16}
    model = decoder(model_type, AutoModelForSequenceClassification, num_labels=3, pad_token_id=0, **changes)
    model.save_pretrained(tmp_path)
    engine, text = Engine(tmp_path), random_text(2, 25)
    assert engine.pools.tasks == ("classify",)
    logits = output(model, text).logits[0]
    assert_close(pool(engine, [text], PoolingParams(task="classify"))[0], logits.softmax(0))


@pytest.mark.parametrize("of_vllm", [False, True])
def test_rerank_by_the_logits_of_two_tokens(of_vllm: bool, tmp_path: Path) -> None:
    """As Qwen3-Reranker: the share of yes among no and yes. vLLM is told so by the overrides of its documentation."""
    model = make_model("qwen3")
    save_model(model, tmp_path)
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    words = [tokenizer.id_to_token(50), tokenizer.id_to_token(60)]
    overrides: dict[str, Any] = {"classifier_from_token": words}
    if of_vllm:
        overrides |= {"architectures": ["Qwen3ForSequenceClassification"], "is_original_qwen3_reranker": True}
    options = ModelOptions(convert="none" if of_vllm else "classify", hf_overrides=overrides)
    engine, text = Engine(tmp_path, model=options), random_text(1, 20)
    assert engine.pools.score_method == "cross_encoder"
    logits = output(model, text).logits[0, -1]
    assert_close(pool(engine, [text], PoolingParams(task="score"))[0], logits[[50, 60]].softmax(0)[1:])
    missing = ModelOptions(convert="classify", hf_overrides={"classifier_from_token": ["never", "heard"]})
    with pytest.raises(UnsupportedModel, match="'never' is not a token"):
        Engine(tmp_path, model=missing)


def test_late_interaction(tmp_path: Path) -> None:
    """ColBERT: a linear layer on every token."""
    model = make_encoder("bert")
    model.save_pretrained(tmp_path)
    dense = {"in_features": 64, "out_features": 16, "bias": False}
    add_modules(tmp_path, ("Dense", dense))
    weight = torch.randn(16, 64)
    save_file({"linear.weight": weight}, tmp_path / "1_Dense" / "model.safetensors")
    engine, text = Engine(tmp_path), random_text(1, 12)
    assert engine.pools.tasks == ("token_embed",)
    assert engine.pools.score_method == "max_sim"
    vectors = F.normalize(F.linear(output(model, text).last_hidden_state[0], weight), dim=-1)
    assert_close(pool(engine, [text], PoolingParams(task="token_embed"))[0], vectors)


def test_matryoshka_dimensions_of_the_config(tmp_path: Path) -> None:
    make_encoder("bert").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "matryoshka_dimensions": [16, 64]}))
    info = Engine(tmp_path).pools
    assert info.matryoshka
    assert info.dimensions == (16, 64)


def test_the_longest_input_is_that_of_sentence_transformers(tmp_path: Path) -> None:
    make_encoder("bert").save_pretrained(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40}))
    assert Engine(tmp_path).info.max_model_len == 40
    assert np.isfinite(pool(Engine(tmp_path), [random_text(1, 40)], EMBED)[0]).all()
