"""Models that were published with code of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.options import ModelOptions
from quire.engine.models.errors import UnsupportedModel
from tests.support.engine import Engine, load
from tests.support.hf_encoders import assert_close, hidden_states, make_encoder, output, random_text
from tests.support.jina import JinaBert

TEXTS = [random_text(i, length) for i, length in enumerate((1, 17, 256, 40))]


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_jinas_embedders(qk_norm: bool, device: Any, tmp_path: Path) -> None:
    """With ALiBi; the second variant normalizes queries and keys."""
    model = JinaBert(qk_norm=qk_norm)
    engine = Engine(model.save(tmp_path), model=ModelOptions(device=device))
    assert engine.info.tasks == ("embed", "token_embed")
    for got, text in zip(hidden_states(engine, TEXTS), TEXTS, strict=True):
        assert_close(got, model.hidden_states(text))


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
    own = {"position_embedding_type": "rope", "rope_theta": 500000.0, "rope_scaling": scaling, "pack_qkv": True}
    custom = {"auto_map": {"AutoConfig": "x/new-impl--configuration.NewConfig"}, "architectures": ["NewModel"]}
    path.write_text(json.dumps({**config, **own, **custom, "model_type": "new"}))
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
