"""Models that were published with code of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.options import ModelOptions
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.models.errors import UnsupportedModel, WeightMismatch
from tests.support.engine import Engine, load
from tests.support.hf_encoders import assert_close, hidden_states, make_encoder, output, pool, random_text
from tests.support.jina import JinaBert

TEXTS = [random_text(i, length) for i, length in enumerate((1, 17, 256, 40))]


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_jinas_embedders(qk_norm: bool, device: Any, tmp_path: Path) -> None:
    """With ALiBi; the second variant normalizes queries and keys."""
    model = JinaBert(qk_norm=qk_norm)
    engine = Engine(model.save(tmp_path), model=ModelOptions(device=device))
    assert engine.pools.tasks == ("embed", "token_embed")
    for got, text in zip(hidden_states(engine, TEXTS), TEXTS, strict=True):
        assert_close(got, model.hidden_states(text))


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("is_named", [False, True])
def test_jinas_rerankers(qk_norm: bool, is_named: bool, tmp_path: Path) -> None:
    """The configs of those that were published name no head, so that `--task score` says it."""
    names = {"architectures": ["JinaBertForSequenceClassification"], "num_labels": 1} if is_named else {}
    model = JinaBert(qk_norm=qk_norm, **names)
    model.add_head()
    model.save(tmp_path)
    prefixed = {
        name if name.startswith("classifier") else f"bert.{name}": model.weights[name] for name in model.weights
    }
    save_file(prefixed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    engine = Engine(tmp_path, model=ModelOptions(task="auto" if is_named else "score"))
    assert engine.pools.tasks == ("score", "classify")
    for got, text in zip(pool(engine, TEXTS, PoolingParams(task="score")), TEXTS, strict=True):
        assert_close(got, model.score(text))


def test_an_embedder_is_no_reranker(tmp_path: Path) -> None:
    with pytest.raises(
        WeightMismatch,
        match=r"weights missing from the checkpoint: .*classifier\.out_proj\.weight or classifier\.weight",
    ):
        Engine(JinaBert().save(tmp_path), model=ModelOptions(task="score"))


def test_jinas_embedders_with_another_feed_forward_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="feed_forward_type"):
        load(JinaBert(feed_forward_type="original").save(tmp_path))


_NOMIC = {
    "model_type": "nomic_bert",
    "architectures": ["NomicBertModel"],
    "auto_map": {"AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig"},
    "activation_function": "swiglu",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 96,
    "n_positions": 8192,
    "max_trained_positions": 256,
    "layer_norm_epsilon": 1e-3,
    "rotary_emb_base": 700,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_scale_base": None,
    "vocab_size": 261,
    "type_vocab_size": 2,
    "prenorm": False,
    "qkv_proj_bias": False,
}


def test_nomics_embedders_with_the_config_of_their_authors(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 700.0}
    model = make_encoder("nomic_bert", layer_norm_eps=1e-3, rope_parameters=rope, vocab_size=261)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(_NOMIC))
    engine = Engine(tmp_path)
    assert engine.info.max_model_len == 256
    for got, text in zip(hidden_states(engine, TEXTS), TEXTS, strict=True):
        assert_close(got, output(model, text).last_hidden_state[0])


@pytest.mark.parametrize(
    "changes",
    [{"activation_function": "gelu"}, {"prenorm": True}, {"rotary_emb_fraction": 0.5}, {"num_experts": 8}],
)
def test_other_options_of_nomics_code_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    make_encoder("nomic_bert").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**_NOMIC, **changes}))
    with pytest.raises(UnsupportedModel, match=next(iter(changes))):
        load(tmp_path)


@pytest.mark.parametrize("scaling", [None, {"type": "ntk", "factor": 2.0}])
def test_gte_under_its_first_name(scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    """As model type "new", with "new." before the weights and the rope in fields of its own."""
    model = make_encoder("gte-untyped", rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({f"new.{name}": tensor for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    config = {name: value for name, value in json.loads(path.read_text()).items() if name != "rope_parameters"}
    fields = {"position_embedding_type": "rope", "rope_theta": 500000.0, "rope_scaling": scaling, "pack_qkv": True}
    custom = {"auto_map": {"AutoConfig": "x/new-impl--configuration.NewConfig"}, "architectures": ["NewModel"]}
    path.write_text(json.dumps({**config, **fields, **custom, "model_type": "new"}))
    if scaling is not None:  # a base that is twice as large, and then frequencies lower by 2^(2 / dim)
        dim = 16
        model.rotary_emb.inv_freq = (2 * 500000.0) ** -(torch.arange(0, dim, 2) / dim) / 2 ** (2 / dim)
    engine = Engine(tmp_path)
    for got, text in zip(hidden_states(engine, TEXTS), TEXTS, strict=True):
        assert_close(got, output(model, text).last_hidden_state[0])


@pytest.mark.parametrize(
    "changes",
    [{"layer_norm_type": "rms_norm"}, {"logn_attention_scale": True}, {"position_embedding_type": "absolute"}],
)
def test_other_options_of_it_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    make_encoder("gte-untyped").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "new", **changes}))
    with pytest.raises(UnsupportedModel, match=next(iter(changes))):
        load(tmp_path)


_JINA_V3 = {
    "model_type": "xlm-roberta",
    "architectures": ["XLMRobertaModel"],
    "auto_map": {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"},
    "position_embedding_type": "rotary",
    "rotary_emb_base": 700.0,
    "lora_adaptations": ["retrieval.query", "retrieval.passage", "text-matching"],
    "lora_rank": 4,
    "lora_alpha": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 261,
    "type_vocab_size": 1,
    "max_position_embeddings": 256,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
}
_ADAPTED = ("Wqkv", "out_proj", "fc1", "fc2", "word_embeddings", "token_type_embeddings")


def write_jina_v3(folder: Path, task: int, *, dropped: str = "") -> Any:
    """Write Jina's embedder v3 with the names of its authors; return transformers' model with a task's adapter."""
    rope = {"rope_type": "default", "rope_theta": 700.0}
    sizes = {"num_hidden_layers": 2, "vocab_size": 261, "type_vocab_size": 1, "pad_token_id": 1}
    model = make_encoder("jina_embeddings_v3", rope_parameters=rope, **sizes)
    model.save_pretrained(folder)  # under the names of the authors
    torch.manual_seed(1)
    weights, merged = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        module, kind = name.rsplit(".", 1)
        merged[name] = weight
        if kind != "weight" or not module.endswith(_ADAPTED):
            weights[f"roberta.{name}"] = weight
            continue
        outputs, inputs = weight.shape
        shapes = ((3, outputs, 4), (3, 4, inputs)) if "embeddings" in module else ((3, 4, inputs), (3, outputs, 4))
        a, b = (torch.randn(shape) * 0.3 for shape in shapes)
        product = a[task] @ b[task] if "embeddings" in module else b[task] @ a[task]
        merged[name] = weight + product * 2 / 4
        parts = {"original": weight, "0.lora_A": a, "0.lora_B": b}
        weights |= {f"roberta.{module}.parametrizations.weight.{part}": value for part, value in parts.items()}
    save_file(merged, folder / "model.safetensors", metadata={"format": "pt"})
    expected = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    remaining = {name: value for name, value in weights.items() if not dropped or dropped not in name}
    save_file(remaining, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_JINA_V3))
    return expected


@pytest.mark.parametrize("task", [None, "retrieval.query", "text-matching"])
def test_tasks_of_jinas_embedder_v3(task: str | None, tmp_path: Path) -> None:
    """The adapter of a task is merged: that of the last one by default, as in vLLM."""
    expected = write_jina_v3(tmp_path, 0 if task == "retrieval.query" else 2)
    options = ModelOptions(hf_overrides={} if task is None else {"jina_task": task})
    engine = Engine(tmp_path, model=options)
    assert engine.info.implementation == "quire"
    for got, text in zip(hidden_states(engine, TEXTS), TEXTS, strict=True):
        assert_close(got, output(expected, text).last_hidden_state[0])


def test_an_unknown_task_of_jinas_embedder_is_named(tmp_path: Path) -> None:
    write_jina_v3(tmp_path, 0)
    with pytest.raises(UnsupportedModel, match=r"jina_task must be one of retrieval\.query, .*, not 'sorting'"):
        Engine(tmp_path, model=ModelOptions(hf_overrides={"jina_task": "sorting"}))


def test_an_incomplete_adapter_of_jinas_embedder_is_named(tmp_path: Path) -> None:
    write_jina_v3(tmp_path, 0, dropped="layers.1.mlp.fc2.parametrizations.weight.0.lora_B")
    with pytest.raises(WeightMismatch, match=r"the adapter of roberta\..*layers\.1\.mlp\.fc2 is incomplete"):
        load(tmp_path)
