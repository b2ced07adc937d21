"""What llama.cpp's converter writes of models with states: metadata, and tensors as it changes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
ARCHITECTURES = {
    "bamba": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "falcon_mamba": "mamba",
    "granitemoehybrid": "granitehybrid",
    "jamba": "jamba",
    "kimi_linear": "kimi-linear",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "minimax": "minimax-01",
    "nemotron_h": "nemotron_h_moe",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_next": "qwen3next",
}
PAIRED = ("bamba", "granitemoehybrid", "nemotron_h")
# Of MiniMax 01's linear attention, which the package does not know.
_LINEAR_ATTENTION = {
    "qkv_proj": "attn_qkv",
    "out_proj": "attn_output",
    "output_gate": "attn_gate",
    "norm": "attn_norm_2",
}
_LAYER = re.compile(r".*\.layers\.(\d+)\.")
_BLOCK = 32  # values of a block, whose bytes stay together


def changed(config: Mapping[str, Any], weights: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays of a file by names of which the package knows those of the file, or by those of the file."""
    if config["model_type"] not in ARCHITECTURES:
        return dict(weights)
    arrays: dict[str, Array] = {}
    for name, weight in weights.items():
        arrays.update(_changed(config, name, weight))
    return arrays


def _changed(config: Mapping[str, Any], name: str, weight: Array) -> Iterator[tuple[str, Array]]:
    kind = config["model_type"]
    layer = match[1] if (match := _LAYER.match(name)) else ""
    if kind.startswith("qwen3_5") and ".linear_attn." in name:
        weight = _tiled(config, name.rpartition("linear_attn.")[2], weight)
    if name.endswith(("slope_rate", "_decay")):  # buffers of transformers' MiniMax
        return
    module = name.removesuffix(".weight").rpartition(".self_attn.")[2]
    if kind == "minimax" and module in _LINEAR_ATTENTION:
        yield f"blk.{layer}.{_LINEAR_ATTENTION[module]}.weight", weight
        return
    if name.endswith("in_proj_qkvz.weight"):
        yield from _parts_of_heads(config, name, weight)
        return
    if name.endswith("shared_mlp.input_linear.weight"):
        suffix = "_shexp" if config["num_local_experts"] else ""
        for side, half in zip(("gate", "up"), np.split(weight, 2), strict=True):
            yield f"blk.{layer}.ffn_{side}{suffix}.weight", half
        return
    if name.endswith("shared_mlp.output_linear.weight"):
        yield f"blk.{layer}.ffn_down{'_shexp' if config['num_local_experts'] else ''}.weight", weight
        return
    if name.endswith("A_log"):
        weight = -np.exp(weight)
    if (
        name.endswith(("A_log", ".D"))
        and weight.ndim == 1
        and kind not in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    ):
        weight = weight[:, None]
    if "conv1d.weight" in name:
        weight = weight.reshape(len(weight), -1)
        weight = weight[None, :, None] if kind == "kimi_linear" else weight
    if kind.startswith("qwen3") and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        weight = weight + np.float32(1)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        weight = weight.reshape(_groups(config), -1)
    if kind == "falcon_h1":
        weight = _multiplied(config, name, weight)
    yield _renamed(name), weight


def _renamed(name: str) -> str:
    """A name that the package knows."""
    name = re.sub(r"\.dt_bias$", ".dt_proj.bias", name)
    name = re.sub(r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj.", name)  # of dense layers
    name = re.sub(r"\.expert_bias$", ".expert_bias.bias", name)
    name = re.sub(r"backbone(\.layers\.\d+)\.mixer\.experts\.", r"model\1.mlp.experts.", name)
    if re.search(r"feed_forward\.experts\.\d+\.w\d", name):
        return name.removeprefix("model.")
    return re.sub(r"feed_forward\.experts\.", "mlp.experts.", name)


def _groups(config: Mapping[str, Any]) -> int:
    groups: int = config.get("mamba_n_groups") or config["n_groups"]
    return groups


def _tiled(config: Mapping[str, Any], module: str, weight: Array) -> Array:
    """The first value head of each key before the second ones."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = config["linear_value_head_dim"]
    order: Array = np.arange(heads).reshape(keys, -1).T.flatten()
    if module in ("A_log", "dt_bias") or module.startswith(("in_proj_a", "in_proj_b")):
        return weight[order]
    rows: Array = (order[:, None] * size + np.arange(size)).flatten()
    if module == "in_proj_z.weight":
        return weight[rows]
    if module == "out_proj.weight" and weight.dtype != np.uint8:
        return weight[:, rows]
    if module == "out_proj.weight":
        blocks = rows.reshape(-1, _BLOCK)[:, 0] // _BLOCK
        ordered: Array = weight.reshape(len(weight), len(blocks), -1)[:, blocks].reshape(weight.shape)
        return ordered
    if module in ("in_proj_qkv.weight", "conv1d.weight"):
        first = 2 * keys * config["linear_key_head_dim"]
        return np.concatenate([weight[:first], weight[first:][rows]])
    return weight


def _parts_of_heads(config: Mapping[str, Any], name: str, weight: Array) -> Iterator[tuple[str, Array]]:
    """All queries before all keys before all values, and the gates of outputs, from those of each key head."""
    keys, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    by_head = weight.reshape(keys, -1, weight.shape[-1])
    parts = np.split(by_head, np.cumsum([width, width, values]), 1)
    flat = [part.reshape(-1, weight.shape[-1]) for part in parts]
    yield name.replace("in_proj_qkvz", "in_proj_qkv"), np.concatenate(flat[:3])
    yield name.replace("in_proj_qkvz", "in_proj_z"), flat[3]


def _multiplied(config: Mapping[str, Any], name: str, weight: Array) -> Array:
    """A weight of Falcon-H1 with its factors."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    attention = config["attention_in_multiplier"]
    factors = {
        "gate_proj": config["mlp_multipliers"][0],
        "down_proj": config["mlp_multipliers"][1],
        "q_proj": attention,
        "k_proj": attention * config["key_multiplier"],
        "v_proj": attention,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    if module == "in_proj":
        inner, states = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = [inner, inner, states, states, config["mamba_n_heads"]]
        rows = np.repeat(np.array(config["ssm_multipliers"], np.float32), sizes)
        return weight * rows[:, None] * np.float32(config["ssm_in_multiplier"])
    return weight * np.float32(factors.get(module, 1.0))


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of a file; keys follow the architecture's name."""
    kind, get = config["model_type"], config.get
    heads, hidden = get("num_attention_heads"), config["hidden_size"]
    types = get("layer_types") or get("layers_block_type")
    if kind == "bamba":
        attention = config["attn_layer_indices"]
        types = ["full_attention" if i in attention else "" for i in range(config["num_hidden_layers"])]
    if kind == "jamba":
        offset, period = config["attn_layer_offset"], config["attn_layer_period"]
        types = ["full_attention" if i % period == offset else "" for i in range(config["num_hidden_layers"])]
    layers = get("num_hidden_layers") or len(types or ())
    is_qwen = kind.startswith("qwen3")
    kv_heads = get("num_key_value_heads")
    if types and not is_qwen and kind not in ("falcon_h1", "minimax"):
        kv_heads = [kv_heads if each == "full_attention" else 0 for each in types]
    rope = get("rope_parameters") or {}
    dim = get("head_dim") or (hidden // heads if heads else None)
    eps = next(get(name) for name in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if get(name))
    length = get("max_position_embeddings") or get("model_max_length")
    alone = kind in ("mamba", "mamba2", "falcon_mamba")
    values = {
        ".context_length": 1 << 20 if alone or kind == "granitemoehybrid" else length,
        ".embedding_length": hidden,
        ".block_count": layers,
        ".feed_forward_length": 0 if alone else get("intermediate_size"),
        ".attention.head_count": 0 if alone else heads,
        ".attention.head_count_kv": None if alone else kv_heads,
        ".attention.key_length": None if alone else get("head_dim"),
        ".attention.layer_norm_rms_epsilon": eps,
        ".rope.freq_base": rope.get("rope_theta"),
        ".expert_count": get("num_local_experts") or get("num_experts") or get("n_routed_experts"),
        ".expert_used_count": get("num_experts_per_tok"),
        ".expert_feed_forward_length": get("moe_intermediate_size"),
        ".expert_shared_feed_forward_length": get("shared_expert_intermediate_size") or get("shared_intermediate_size"),
    }
    return {**values, **_state(config, layers, dim, types)}


def _state(config: Mapping[str, Any], layers: int, dim: int | None, types: Any) -> dict[str, Any]:
    kind, get = config["model_type"], config.get
    if kind.startswith("qwen3"):
        rope = config["rope_parameters"]
        heads = config["linear_num_value_heads"]
        return {
            ".ssm.conv_kernel": config["linear_conv_kernel_dim"],
            ".ssm.state_size": config["linear_key_head_dim"],
            ".ssm.group_count": config["linear_num_key_heads"],
            ".ssm.time_step_rank": heads,
            ".ssm.inner_size": heads * config["linear_value_head_dim"],
            ".attention.recurrent_layers": [each == "linear_attention" for each in types],
            ".rope.dimension_count": int((dim or 0) * rope.get("partial_rotary_factor", 0.25)),
        }
    if kind.startswith("lfm2"):
        size = int(2 * config["intermediate_size"] / 3)
        multiple = get("block_multiple_of") or 1
        dense = {".feed_forward_length": -(-size // multiple) * multiple}
        moe = {".leading_dense_block_count": get("num_dense_layers"), ".expert_gating_func": 2}
        return {".shortconv.l_cache": config["conv_L_cache"], **(dense if kind == "lfm2" else moe)}
    if kind == "kimi_linear":
        return _kimi(config, types)
    if kind == "minimax":  # every eighth layer has no state
        return {".residual_scale": config["mlp_alpha_factor"], ".rope.dimension_count": config["rotary_dim"]}
    heads = get("mamba_n_heads") or get("mamba_num_heads") or get("num_heads")
    head_dim = get("mamba_d_head") or get("mamba_head_dim") or get("head_dim")
    inner = heads * head_dim if heads else get("intermediate_size")
    if kind == "jamba":
        inner = config["mamba_expand"] * config["hidden_size"]
    state: dict[str, Any] = {
        ".ssm.conv_kernel": get("mamba_d_conv") or get("conv_kernel"),
        ".ssm.state_size": get("mamba_d_state") or get("ssm_state_size") or get("state_size"),
        ".ssm.group_count": get("mamba_n_groups") or get("n_groups"),
        ".ssm.inner_size": inner,
        ".ssm.time_step_rank": heads or get("mamba_dt_rank") or get("time_step_rank"),
    }
    if kind == "falcon_mamba":
        state[".ssm.dt_b_c_rms"] = True
    if kind == "granitemoehybrid":
        scales = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
        keys = (".attention.scale", ".embedding_scale", ".residual_scale", ".logit_scale")
        state |= {key: float(config[name]) for key, name in zip(keys, scales, strict=True)}
        state[".rope.scaling.finetuned"] = False
    if kind == "bamba":
        state |= {".rope.scaling.finetuned": True, ".rope.dimension_count": (dim or 0) // 2}
    if kind == "nemotron_h":
        sizes = {"moe": config["moe_intermediate_size"], "mlp": config["intermediate_size"]}
        state |= {
            ".feed_forward_length": [sizes.get(each, 0) for each in types],
            ".expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            ".expert_shared_count": config["n_shared_experts"],
            ".expert_weights_norm": config["norm_topk_prob"],
            ".expert_weights_scale": float(config["routed_scaling_factor"]),
            ".expert_group_count": config["n_group"],
            ".expert_group_used_count": config["topk_group"],
        }
    return state


def _kimi(config: Mapping[str, Any], types: Any) -> dict[str, Any]:
    rank, shared = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        ".attention.head_count_kv": [int(kind == "full_attention") for kind in types],
        ".ssm.conv_kernel": config["linear_conv_kernel_dim"],
        ".kda.head_dim": config["linear_head_dim"],
        ".attention.q_lora_rank": config["q_lora_rank"],
        ".attention.kv_lora_rank": rank,
        ".attention.key_length": rank + shared,
        ".attention.key_length_mla": config["qk_nope_head_dim"] + shared,
        ".attention.value_length_mla": config["v_head_dim"],
        ".rope.dimension_count": shared,
        ".rope.freq_base": None,
        ".expert_count": config["num_experts"],
        ".expert_used_count": config["num_experts_per_token"],
        ".expert_shared_count": config["num_shared_experts"],
        ".leading_dense_block_count": config["mlp_layer_types"].index("sparse"),
        ".expert_weights_scale": float(config["routed_scaling_factor"]),
        ".expert_gating_func": 2,
    }
