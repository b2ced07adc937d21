"""Random configs of each model family, as odd as transformers accepts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.support.models import BASE

Draw = Callable[[st.SearchStrategy[Any]], Any]
Config = dict[str, Any]

# Keys of some families; the others must ignore them.
_FOREIGN: Config = {
    "attention_bias": True,
    "mlp_bias": True,
    "partial_rotary_factor": 0.5,
    "hidden_activation": "gelu",
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 5.0,
    "query_pre_attn_scalar": 3,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.5,
    "use_sliding_window": True,
    "norm_topk_prob": True,
    "num_experts": 4,
    "rope_interleave": False,
    "scoring_func": "softmax",
    "use_qk_norm": True,
}
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "relu", "swish")
_ROPES = ("default", "default", "linear", "dynamic", "llama3", "yarn", "longrope")
_WINDOWS = (2, 3, 8, 24, 39, 64)  # with 1, the cache of transformers keeps everything


def _one_of(draw: Draw, *values: Any) -> Any:
    return draw(st.sampled_from(values))


def _rope(draw: Draw, pairs: int, kinds: tuple[str, ...] = _ROPES) -> Config:
    """RoPE parameters; prompts of `test_config_fuzz` are on both sides of a long rope's length, and do not pass it."""
    params: Config = {"rope_theta": _one_of(draw, 100.0, 1e4, 5e5)}
    kind = _one_of(draw, *kinds)
    params["rope_type"] = kind
    if kind != "default":
        params["factor"] = _one_of(draw, 1.0, 2.0, 7.5)
    if kind in ("llama3", "yarn", "longrope"):
        params["original_max_position_embeddings"] = _one_of(draw, 16, 24, 32)
    if kind == "llama3":
        params |= {"low_freq_factor": _one_of(draw, 0.5, 1.0), "high_freq_factor": _one_of(draw, 2.0, 4.0)}
    if kind == "yarn":
        choices = {
            "factor": (0.5, 1.0),
            "beta_fast": (8, 32.0),
            "beta_slow": (1, 2),
            "truncate": (True, False),
            "attention_factor": (0.7, 1.5),
            "mscale": (0.5, 1.0),
            "mscale_all_dim": (0.7, 1.0),
        }
        params |= _some(draw, choices)
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            params[name] = draw(st.lists(st.sampled_from((1.0, 1.3, 2.5, 10.0)), min_size=pairs, max_size=pairs))
        params |= _some(draw, {"attention_factor": (0.7, 1.5)})
    return params


def _some(draw: Draw, choices: dict[str, tuple[Any, ...]]) -> Config:
    """Values for some of the keys."""
    return {key: _one_of(draw, *values) for key, values in choices.items() if draw(st.booleans())}


def _ropes(draw: Draw, pairs: int) -> Config:
    """The rope of a config, in today's form or in the older one."""
    return _written(draw, _rope(draw, pairs))


def _written(draw: Draw, params: Config) -> Config:
    """RoPE parameters in today's form or in the older one; the trained length in them, beside them, or both."""
    beside: Config = {}
    if "original_max_position_embeddings" in params and draw(st.booleans()):
        beside["original_max_position_embeddings"] = _one_of(draw, 16, 24, 32)
        if draw(st.booleans()):
            del params["original_max_position_embeddings"]
    if draw(st.booleans()):
        return {"rope_parameters": params, **beside}
    theta = params.pop("rope_theta")
    return {"rope_theta": theta, **({} if params["rope_type"] == "default" else {"rope_scaling": params}), **beside}


def _common(draw: Draw) -> Config:
    kv_heads = _one_of(draw, 1, 2, 3)
    heads = kv_heads * _one_of(draw, 1, 2, 4)
    dim = _one_of(draw, 8, 12, 20, 32, 72)
    hidden = heads * _one_of(draw, 8, 12, 28)  # transformers multiplies by experts only in multiples of 4
    if draw(st.booleans()):
        hidden = heads * dim  # as where `head_dim` is not given
    return {
        **BASE,
        "hidden_size": hidden,
        "head_dim": dim,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": draw(st.integers(1, 3)),
        "intermediate_size": _one_of(draw, 24, 52, 96),
        "vocab_size": _one_of(draw, 256, 301),
        "max_position_embeddings": _one_of(draw, 64, 100, 256),
        "rms_norm_eps": _one_of(draw, 1e-6, 1e-5, 1e-2),
        "tie_word_embeddings": draw(st.booleans()),
        "hidden_act": _one_of(draw, *_ACTIVATIONS),
        **_ropes(draw, dim // 2),
    }


def _layer_types(draw: Draw, config: Config) -> Config:
    """A window, and the layers that have it."""
    used = draw(st.booleans())
    kinds = st.sampled_from(("full_attention", *(("sliding_attention",) if used else ())))
    count = config["num_hidden_layers"]
    return {
        "sliding_window": _one_of(draw, *_WINDOWS),
        "use_sliding_window": used,
        "layer_types": draw(st.none() | st.lists(kinds, min_size=count, max_size=count)),
    }


def _biases(draw: Draw, _: Config) -> Config:
    return {"attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}


def _window(draw: Draw, _: Config) -> Config:
    return {"sliding_window": _one_of(draw, None, *_WINDOWS)}


def _experts(draw: Draw, _: Config) -> Config:
    experts = draw(st.integers(1, 5))
    chosen = draw(st.integers(1, experts))
    names = dict.fromkeys(("num_experts", "num_local_experts"), experts)
    return {**names, "num_experts_per_tok": chosen, "moe_intermediate_size": _one_of(draw, 16, 40)}


def _mixtral(draw: Draw, config: Config) -> Config:
    return _experts(draw, config) | _window(draw, config)


def _qwen2(draw: Draw, config: Config) -> Config:
    return _layer_types(draw, config) | {"max_window_layers": draw(st.integers(0, 3))}


def _qwen3(draw: Draw, config: Config) -> Config:
    return _qwen2(draw, config) | {"attention_bias": draw(st.booleans())}


def _qwen3_moe(draw: Draw, config: Config) -> Config:
    layers = st.lists(st.integers(0, config["num_hidden_layers"] - 1), max_size=2)
    return {
        **_experts(draw, config),
        "attention_bias": draw(st.booleans()),
        "sliding_window": _one_of(draw, *_WINDOWS),
        "use_sliding_window": draw(st.booleans()),
        "norm_topk_prob": draw(st.booleans()),
        "decoder_sparse_step": _one_of(draw, 1, 2),
        "mlp_only_layers": draw(layers),
    }


def _qwen2_moe(draw: Draw, config: Config) -> Config:
    return {
        **_qwen3_moe(draw, config),
        **_layer_types(draw, config),
        "qkv_bias": draw(st.booleans()),
        "shared_expert_intermediate_size": _one_of(draw, 24, 40),
    }


def _phi3(draw: Draw, config: Config) -> Config:
    kind = _one_of(draw, "default", "longrope")
    partial = _one_of(draw, 0.5, 1.0, *((0.25, 0.8) if kind == "default" else ()))
    return {
        **_window(draw, config),
        "hidden_size": config["num_attention_heads"] * config["head_dim"],
        "partial_rotary_factor": partial,
        "rope_parameters": _rope(draw, int(config["head_dim"] * partial) // 2, (kind,)),
    }


def _gemma2(draw: Draw, config: Config) -> Config:
    return {
        **_layer_types(draw, config),
        "query_pre_attn_scalar": _one_of(draw, 1, 16, 50),
        "attn_logit_softcapping": _one_of(draw, None, 0.5, 50.0),
        "final_logit_softcapping": _one_of(draw, None, -3.0, 2.0, 30.0),
        "hidden_activation": _one_of(draw, *_ACTIVATIONS),
        "attention_bias": draw(st.booleans()),
    }


def _gemma3(draw: Draw, config: Config) -> Config:
    fields = _gemma2(draw, config)
    if draw(st.booleans()):
        pairs = config["head_dim"] // 2
        fields["rope_parameters"] = {
            "full_attention": _rope(draw, pairs),
            "sliding_attention": {"rope_type": "default", "rope_theta": _one_of(draw, 100.0, 1e4)},
        }
    else:
        fields |= _some(draw, {"rope_local_base_freq": (100.0, 1e4), "sliding_window_pattern": (1, 2, 6)})
    return fields


def _olmo2(draw: Draw, _: Config) -> Config:
    return {"attention_bias": draw(st.booleans())}


def _granite(draw: Draw, config: Config) -> Config:
    return {
        **_biases(draw, config),
        "attention_multiplier": _one_of(draw, 1e-30, 0.05, 0.3),
        "embedding_multiplier": _one_of(draw, -0.7, 0.5, 12),
        "residual_multiplier": _one_of(draw, -0.3, 0.0, 0.2, 1.5),
        "logits_scaling": _one_of(draw, -2.0, 0.5, 8),
    }


def _granitemoe(draw: Draw, config: Config) -> Config:
    return _experts(draw, config) | _granite(draw, config)


def _smollm3(draw: Draw, config: Config) -> Config:
    count = config["num_hidden_layers"]
    return {
        **_layer_types(draw, config),
        **_biases(draw, config),
        **_some(draw, {"no_rope_layer_interval": (1, 2, 4)}),
        "no_rope_layers": draw(st.none() | st.lists(st.integers(0, 1), min_size=count, max_size=count)),
    }


def _gpt_oss(draw: Draw, config: Config) -> Config:
    return {
        **_experts(draw, config),
        **_layer_types(draw, config),
        "attention_bias": draw(st.booleans()),
        "hidden_act": "silu",
    }


def _deepseek_v2(draw: Draw, config: Config) -> Config:
    fields = _deepseek_v3(draw, config)
    return {
        **{name: value for name, value in fields.items() if name != "head_dim"},
        "topk_method": _one_of(draw, "greedy", "group_limited_greedy"),
    }


def _deepseek_v3(draw: Draw, config: Config) -> Config:
    groups = _one_of(draw, 1, 2, 4)
    size = _one_of(draw, 2, 3)
    chosen_groups = draw(st.integers(1, groups))
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": _one_of(draw, 8, 16, 20),
        "v_head_dim": _one_of(draw, 8, 16, 28),
        "q_lora_rank": _one_of(draw, None, 24),
        "kv_lora_rank": _one_of(draw, 16, 40),
        "n_group": groups,
        "topk_group": chosen_groups,
        "n_routed_experts": groups * size,
        "num_experts_per_tok": draw(st.integers(1, chosen_groups * size)),
        "n_shared_experts": _one_of(draw, 1, 2),
        "first_k_dense_replace": draw(st.integers(0, 3)),
        "moe_intermediate_size": _one_of(draw, 16, 40),
        "norm_topk_prob": draw(st.booleans()),
        "routed_scaling_factor": _one_of(draw, -1.0, 0.0, 0.5, 2.5),
        "rope_interleave": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        **_ropes(draw, 4),
    }


def _partial(draw: Draw, config: Config, heads: int) -> Config:
    """A rope of a part of each head, whose size is even: otherwise transformers fails with some scalings."""
    dim = config["hidden_size"] // heads
    factor = _one_of(draw, *(part for part in (0.25, 0.4, 0.5, 1.0) if int(dim * part) % 2 == 0))
    params = _rope(draw, int(dim * factor) // 2, ("default", "default", "linear", "llama3", "yarn", "longrope"))
    if draw(st.booleans()):
        fields = _written(draw, {**params, "partial_rotary_factor": factor})
        if any("partial_rotary_factor" in (fields.get(name) or {}) for name in ("rope_parameters", "rope_scaling")):
            return {**fields, "head_dim": dim}
    return {**_written(draw, params), "partial_rotary_factor": factor, "head_dim": dim}


def _layer_norm_decoder(draw: Draw, config: Config) -> Config:
    """Families whose heads divide the hidden size."""
    heads = config["num_attention_heads"]
    hidden = heads * _one_of(draw, 8, 16, 20, 40)
    return {
        "hidden_size": hidden,
        **_partial(draw, {**config, "hidden_size": hidden}, heads),
        "layer_norm_eps": _one_of(draw, 1e-5, 1e-2),
    }


def _gpt_neox(draw: Draw, config: Config) -> Config:
    flags = {"use_parallel_residual": draw(st.booleans()), "attention_bias": draw(st.booleans())}
    fields = _layer_norm_decoder(draw, config)
    if "partial_rotary_factor" in fields:
        fields["rotary_pct"] = fields.pop("partial_rotary_factor")
    return {**fields, **flags, "num_key_value_heads": config["num_attention_heads"]}


def _stablelm(draw: Draw, config: Config) -> Config:
    flags = {"use_parallel_residual": draw(st.booleans()), "use_qkv_bias": draw(st.booleans())}
    return {**_layer_norm_decoder(draw, config), **flags}


def _starcoder2(draw: Draw, config: Config) -> Config:
    fields = {"use_bias": draw(st.booleans()), "norm_epsilon": _one_of(draw, 1e-5, 1e-2)}
    return {**_window(draw, config), **fields, **_whole_heads(draw, config)}


def _cohere(draw: Draw, config: Config) -> Config:
    fields = {"logit_scale": _one_of(draw, -0.5, 0.0625, 2.0), "layer_norm_eps": _one_of(draw, 1e-5, 1e-2)}
    return {"attention_bias": draw(st.booleans()), "use_qk_norm": False, **fields, **_whole_heads(draw, config)}


def _whole_heads(draw: Draw, config: Config) -> Config:
    """Heads that divide the hidden size, and their rope."""
    dim = _one_of(draw, 8, 16, 20)
    return {"hidden_size": config["num_attention_heads"] * dim, "head_dim": dim, **_ropes(draw, dim // 2)}


def _both_directions(draw: Draw, config: Config, model_type: str) -> Config:
    """The config of a decoder that attends in both directions; ropes that depend on the length only up to that."""
    fields: Config = {"is_causal": False}
    if model_type == "gemma3_text" and draw(st.booleans()):
        fields = {"use_bidirectional_attention": True, **({"is_causal": False} if draw(st.booleans()) else {})}
    return {**config, **fields}


# Families that may attend in both directions, with windows.
BIDIRECTIONAL = ("gemma2", "gemma3_text", "mistral", "mixtral", "qwen2", "qwen3", "smollm3", "starcoder2", "gpt_neox")

# Model type -> what its config has besides the common keys, and those of them that it does not ignore.
FAMILIES: dict[str, Callable[[Draw, Config], Config]] = {
    "cohere": _cohere,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "granitemoe": _granitemoe,
    "llama": _biases,
    "mistral": _window,
    "mixtral": _mixtral,
    "olmo2": _olmo2,
    "phi": _layer_norm_decoder,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
_PARTIAL = ("gpt_neox", "phi", "phi3", "stablelm")  # rotate a part of each head


@st.composite
def odd_configs(draw: Draw, model_type: str) -> Config:
    """The config.json of a model of a family."""
    config = _common(draw)
    fields = FAMILIES[model_type](draw, config)
    rope_keys = {"rope_parameters", "rope_theta", "rope_scaling", "original_max_position_embeddings"}
    if rope_keys & set(fields):
        config = {key: value for key, value in config.items() if key not in rope_keys}
    foreign = draw(st.lists(st.sampled_from(sorted(_FOREIGN)), max_size=3, unique=True))
    merged = {"model_type": model_type, **{key: _FOREIGN[key] for key in foreign}, **config, **fields}
    if model_type == "gpt_oss" or (model_type not in _PARTIAL and not _has_default_ropes(merged)):
        merged.pop("partial_rotary_factor", None)  # transformers fails; the default of gpt-oss is yarn
    if model_type == "cohere":
        merged["use_qk_norm"] = False
    return merged


@st.composite
def bidirectional_configs(draw: Draw, model_type: str) -> Config:
    """The config.json of a decoder of a family that attends in both directions."""
    return _both_directions(draw, draw(odd_configs(model_type)), model_type)


def _has_default_ropes(config: Config) -> bool:
    params = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parts = [value for value in params.values() if isinstance(value, dict)] or [params]
    return all(part.get("rope_type", "default") == "default" for part in parts)
