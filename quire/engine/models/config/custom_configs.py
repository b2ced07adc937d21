"""Configs of models that were published with custom code, and that transformers supports under another name now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.models.errors import UnsupportedModel

# Of the encoder of audio: the name that transformers has, by the authors'.
_PHI4_AUDIO = {
    "attention_dim": "hidden_size",
    "attention_heads": "num_attention_heads",
    "linear_units": "intermediate_size",
    "depthwise_seperable_out_channel": "depthwise_separable_out_channel",
}
_PHI4_SAME = (
    *("num_blocks", "activation", "chunk_size", "left_chunk", "dropout_rate", "ext_pw_out_channel", "kernel_size"),
    *("depthwise_multiplier", "conv_activation", "input_size", "conv_glu_type", "time_reduction"),
)
_PHI4_DROPPED = ("auto_map", "audio_processor", "embd_layer", "img_processor", "vision_lora", "_attn_implementation")
# Of Nomic's code: the name that transformers has, by Nomic's, and the values that transformers' implementation has.
_NOMIC = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
    "max_trained_positions": "max_position_embeddings",
}
_NOMIC_NEEDED = {
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm", "causal", "use_rms_norm"), False),
    **dict.fromkeys(("parallel_block", "rotary_emb_interleaved"), False),
    "rotary_emb_fraction": 1.0,
    "rotary_emb_scale_base": None,
    "num_experts": 0,
}
_NOMIC_ACTS = {"swiglu": "silu", "geglu": "gelu"}
_NEEDED = {"layer_norm_type": "layer_norm", "position_embedding_type": "rope", "logn_attention_scale": False}


def with_known_type(raw: dict[str, Any]) -> dict[str, Any]:
    """The config under the name that transformers has for its model type; the argument itself if that is the same.

    Raises:
        UnsupportedModel: transformers' implementation lacks an option.
    """
    if raw.get("model_type") == "phi4mm":
        return _phi4_multimodal(raw)
    if raw.get("model_type") == "xlm-roberta" and raw.get("position_embedding_type") == "rotary":
        return _jina(raw)
    if raw.get("model_type") == "nomic_bert" and "n_embd" in raw:
        return _nomic(raw)
    if raw.get("model_type") != "new":
        return raw
    _check_values(raw, _NEEDED)
    known = {name: value for name, value in raw.items() if name not in ("auto_map", "rope_theta", "rope_scaling")}
    scaling = raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise UnsupportedModel(f"rope_scaling must be an object, not {scaling!r}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    rope = {**scaling, "rope_type": kind, "rope_theta": raw.get("rope_theta", 10000.0)}
    names = [name.replace("New", "Gte") for name in raw.get("architectures") or []]
    return {**known, "model_type": "gte", "architectures": names, "rope_parameters": rope}


def _check_values(raw: Mapping[str, Any], needed: Mapping[str, Any]) -> None:
    for name, value in needed.items():
        if raw.get(name) is not None and raw[name] != value:
            raise UnsupportedModel(f"{name} {raw[name]!r} is not supported; supported is {value!r}")


def _nomic(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of Nomic Embed as its authors have published it."""
    _check_values(raw, _NOMIC_NEEDED)
    act = raw.get("activation_function", "swiglu")
    if act not in _NOMIC_ACTS:
        raise UnsupportedModel(f"activation_function {act!r} is not supported; supported are {', '.join(_NOMIC_ACTS)}")
    known = {name: value for name, value in raw.items() if name != "auto_map" and name not in _NOMIC}
    renamed = {ours: raw[theirs] for theirs, ours in _NOMIC.items() if theirs in raw}
    rope = {"rope_type": "default", "rope_theta": raw.get("rotary_emb_base", 1000.0)}
    return {**known, **renamed, "hidden_act": _NOMIC_ACTS[act], "rope_parameters": rope}


def _jina(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of Jina's embedder v3 as its authors have published it."""
    known = {name: value for name, value in raw.items() if name not in ("auto_map", "position_embedding_type")}
    names = [name.replace("XLMRoberta", "JinaEmbeddingsV3") for name in raw.get("architectures") or []]
    rope = {"rope_type": "default", "rope_theta": raw.get("rotary_emb_base", 10000.0)}
    return {**known, "model_type": "jina_embeddings_v3", "architectures": names, "rope_parameters": rope}


def _phi4_multimodal(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of Phi-4 Multimodal as its authors have published it."""
    known = {name: value for name, value in raw.items() if name not in _PHI4_DROPPED}
    own = _object(_object(raw, "audio_processor"), "config")
    audio = {name: own[name] for name in _PHI4_SAME if name in own}
    audio |= {name: own[theirs] for theirs, name in _PHI4_AUDIO.items() if theirs in own}
    if (channels := _object(own, "nemo_conv_settings").get("conv_channels")) is not None:
        audio["nemo_conv_channels"] = channels
    if (distance := _object(own, "relative_attention_bias_args").get("t5_bias_max_distance")) is not None:
        audio["bias_max_distance"] = distance
    rate = _object(_object(raw, "embd_layer"), "audio_embd_layer").get("downsample_rate")
    if rate is not None:
        audio["downsample_rate"] = rate
    names = ["Phi4MultimodalForCausalLM"]
    return {**known, "model_type": "phi4_multimodal", "architectures": names, "audio_config": audio}


def _object(section: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = section.get(name) or {}
    if not isinstance(value, Mapping):
        raise UnsupportedModel(f"{name} must be an object, not {value!r}")
    return value
