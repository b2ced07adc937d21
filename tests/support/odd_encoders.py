"""Random configs of encoders, as odd as transformers accepts them, and the heads that they may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.support.odd_configs import Config, Draw

_ACTIVATIONS = ("gelu", "gelu_new", "relu", "silu", "gelu_pytorch_tanh", "quick_gelu")


def _one_of(draw: Draw, *values: Any) -> Any:
    return draw(st.sampled_from(values))


def _common(draw: Draw) -> Config:
    heads = _one_of(draw, 1, 2, 4)
    hidden = heads * _one_of(draw, 8, 12, 20, 32)
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": draw(st.integers(1, 3)),
        "intermediate_size": _one_of(draw, 24, 52, 96),
        "vocab_size": _one_of(draw, 256, 301),
        "max_position_embeddings": _one_of(draw, 64, 100, 256),
        "type_vocab_size": _one_of(draw, 1, 2, 3),
        "layer_norm_eps": _one_of(draw, 1e-12, 1e-5, 1e-2),
        "hidden_act": _one_of(draw, *_ACTIVATIONS),
        "pad_token_id": _one_of(draw, 0, 1, 3),
        "tie_word_embeddings": draw(st.booleans()),
    }


def _embedding_size(draw: Draw, config: Config) -> Config:
    return {"embedding_size": _one_of(draw, 16, 40, config["hidden_size"])}


def _albert(draw: Draw, config: Config) -> Config:
    layers = config["num_hidden_layers"]
    groups = draw(st.integers(1, layers))
    return {**_embedding_size(draw, config), "num_hidden_groups": groups, "inner_group_num": _one_of(draw, 1, 1, 2)}


def _ernie(draw: Draw, _: Config) -> Config:
    return {"use_task_id": draw(st.booleans()), "task_type_vocab_size": _one_of(draw, 1, 3)}


def _distilbert(draw: Draw, config: Config) -> Config:
    return {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "hidden_dim": config["intermediate_size"],
        "activation": _one_of(draw, "gelu", "relu", "silu"),
    }


def _deberta(draw: Draw, config: Config) -> Config:
    return {
        **_embedding_size(draw, config),
        "relative_attention": True,
        "position_biased_input": draw(st.booleans()),
        "pos_att_type": draw(st.lists(st.sampled_from(("p2c", "c2p")), unique=True)),
        "norm_rel_ebd": _one_of(draw, "layer_norm", "none"),
        "share_att_key": draw(st.booleans()),
        "position_buckets": _one_of(draw, -1, 8, 16),
        "max_relative_positions": _one_of(draw, -1, 40),
        "type_vocab_size": _one_of(draw, 0, 2),
        "conv_kernel_size": _one_of(draw, 0, 0, 0, 3),
    }


def _eurobert(draw: Draw, config: Config) -> Config:
    return {
        "num_key_value_heads": _one_of(draw, 1, config["num_attention_heads"]),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "rms_norm_eps": _one_of(draw, 1e-6, 1e-2),
        "classifier_pooling": _one_of(draw, "bos", "mean", "late"),
        **_rope(draw),
    }


def _modernbert(draw: Draw, _: Config) -> Config:
    flags = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias", "decoder_bias")
    return {
        **{flag: draw(st.booleans()) for flag in flags},
        "norm_eps": _one_of(draw, 1e-5, 1e-2),
        "hidden_activation": _one_of(draw, *_ACTIVATIONS),
        "classifier_activation": _one_of(draw, *_ACTIVATIONS),
        "classifier_pooling": _one_of(draw, "cls", "mean"),
        "local_attention": _one_of(draw, 8, 24),
        "global_attn_every_n_layers": _one_of(draw, 1, 2, 3),
        "cls_token_id": 1,
        "sep_token_id": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _rope(draw: Draw) -> Config:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": _one_of(draw, 100.0, 1e4, 5e5)}}


def _roped(draw: Draw, _: Config) -> Config:
    return _rope(draw)


def _plain(_draw: Draw, _: Config) -> Config:
    return {}


# Model type -> what its config has besides the common keys.
ENCODER_FAMILIES: dict[str, Callable[[Draw, Config], Config]] = {
    "albert": _albert,
    "bert": _plain,
    "camembert": _plain,
    "data2vec-text": _plain,
    "deberta": _deberta,
    "deberta-v2": _deberta,
    "distilbert": _distilbert,
    "electra": _embedding_size,
    "ernie": _ernie,
    "eurobert": _eurobert,
    "gte": _roped,
    "jina_embeddings_v3": _roped,
    "modernbert": _modernbert,
    "mpnet": _plain,
    "nomic_bert": _roped,
    "roberta": _plain,
    "xlm-roberta": _plain,
    "xlm-roberta-xl": _plain,
}


@st.composite
def odd_encoders(draw: Draw, model_type: str) -> Config:
    """The config.json of an encoder of a family."""
    config = _common(draw)
    return {"model_type": model_type, **config, **ENCODER_FAMILIES[model_type](draw, config)}
