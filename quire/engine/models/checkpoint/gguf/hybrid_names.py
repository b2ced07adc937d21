"""Names of the tensors of models with states in GGUF files, and what llama.cpp's converter has changed in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quire.engine.models.checkpoint.gguf.facts import GgufFacts
from quire.engine.models.checkpoint.gguf.hybrids import is_bamba, value_heads_by_key
from quire.engine.models.checkpoint.gguf.rules import (
    ATTENTION,
    DECODER,
    EXPERTS,
    LATENT,
    LLAMA,
    MLP,
    QWEN2_MOE,
    Change,
    Make,
    Piece,
    Rules,
)


def _log_rates(tensors: Sequence[Tensor]) -> Tensor:
    """Logarithms of rates, which files have as negative rates: (channels, size), or (heads,)."""
    rates = -tensors[0].float()
    return (rates if rates.dim() == 2 and rates.shape[1] > 1 else rates.flatten()).log()


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].flatten()


def _taps(tensors: Sequence[Tensor]) -> Tensor:
    """(channels, width) of a convolution, which files have with further dimensions of size 1."""
    return tensors[0].reshape(-1, tensors[0].shape[-1])


def _channels(tensors: Sequence[Tensor]) -> Tensor:
    """(channels, 1, width) of a convolution."""
    return _taps(tensors)[:, None]


def _by(make: Make) -> Change:
    return lambda _, piece: replace(piece, make=make)


def _value_order(facts: GgufFacts, size: int) -> Tensor:
    """Where each row of the value heads lies in a file of Qwen 3.5, if a head has `size` rows.

    Files have the first head of each key before the second ones; checkpoints have all heads of a key together.
    """
    heads, shared = facts.integer(".ssm.time_step_rank"), value_heads_by_key(facts)
    order = torch.arange(heads).view(shared, -1).t().flatten()
    return (order[:, None] * size + torch.arange(size)).flatten()


def _value_size(facts: GgufFacts) -> int:
    return facts.integer(".ssm.inner_size") // facts.integer(".ssm.time_step_rank")


def _behind_keys(facts: GgufFacts, piece: Piece) -> Piece:
    """With the values behind queries and keys in order."""
    first = 2 * facts.integer(".ssm.state_size") * facts.integer(".ssm.group_count")
    return replace(piece, rows=torch.cat([torch.arange(first), first + _value_order(facts, _value_size(facts))]))


def _value_rows(facts: GgufFacts, piece: Piece) -> Piece:
    return replace(piece, rows=_value_order(facts, _value_size(facts)))


def _head_rows(facts: GgufFacts, piece: Piece) -> Piece:
    return replace(piece, rows=_value_order(facts, 1))


def _value_columns(facts: GgufFacts, piece: Piece) -> Piece:
    return replace(piece, columns=_value_order(facts, _value_size(facts)))


def _ordered_log_rates(order: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    return _log_rates(tensors)[order]


def _head_log_rates(facts: GgufFacts, piece: Piece) -> Piece:
    return replace(piece, make=partial(_ordered_log_rates, _value_order(facts, 1)))


_DELTA_NET = {
    **LLAMA,
    **EXPERTS,
    **QWEN2_MOE,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_out": "linear_attn.out_proj",
}
_DELTA_NET_WHOLE = {
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
}
_QWEN3_NEXT = Rules(_DELTA_NET, norm_offset=1.0, whole=_DELTA_NET_WHOLE, changes={"ssm_a": _by(_log_rates)})
_QWEN35 = replace(
    _QWEN3_NEXT,
    changes={
        "attn_qkv.weight": _behind_keys,
        "attn_gate.weight": _value_rows,
        "ssm_conv1d.weight": _behind_keys,
        "ssm_alpha.weight": _head_rows,
        "ssm_beta.weight": _head_rows,
        "ssm_dt.bias": _head_rows,
        "ssm_a": _head_log_rates,
        "ssm_out.weight": _value_columns,
    },
)


def _mixer(module: str) -> dict[str, str]:
    """The names of the modules of a state space."""
    names = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_x": "x_proj", "ssm_dt": "dt_proj", "ssm_out": "out_proj"}
    norms = {f"ssm_{name}_norm": f"{name}_layernorm" for name in ("dt", "b", "c")}
    return {file: f"{module}.{name}" for file, name in {**names, **norms, "ssm_norm": "norm"}.items()}


def _mixer_whole(module: str, *, has_heads: bool = True) -> dict[str, str]:
    """The names of its other weights. `has_heads`: it is one of heads, whose steps have a bias alone."""
    steps = {"ssm_dt.bias": f"{module}.dt_bias"} if has_heads else {}
    return {"ssm_a": f"{module}.A_log", "ssm_d": f"{module}.D", **steps}


_MIXER_CHANGES: Mapping[str, Change] = {
    "ssm_a": _by(_log_rates),
    "ssm_d": _by(_flat),
    "ssm_norm.weight": _by(_flat),
    "ssm_conv1d.weight": _by(_taps),
}
_FEED_FORWARD = {name: module.replace("mlp.", "feed_forward.") for name, module in MLP.items()}
_HYBRID_MODULES = {**DECODER, "output_norm": "model.final_layernorm"}
_GRANITE = Rules(
    {
        **LLAMA,
        **_mixer("mamba"),
        **{name: module.replace("mlp.", "shared_mlp.") for name, module in MLP.items()},
        **{f"{name}_shexp": module.replace("mlp.", "shared_mlp.") for name, module in MLP.items()},
        **{f"{name}_exps": f"block_sparse_moe.experts.{{}}.{module[4:]}" for name, module in MLP.items()},
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_down": "shared_mlp.output_linear",
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
    pairs=True,
    whole=_mixer_whole("mamba"),
    changes=_MIXER_CHANGES,
)
_BAMBA = replace(
    _GRANITE,
    layer={**ATTENTION, **_mixer("mamba"), **_FEED_FORWARD, "ffn_norm": "pre_ff_layernorm"},
    modules=_HYBRID_MODULES,
)
_KIMI = Rules(
    {
        **LLAMA,
        **LATENT,
        **{f"{name}_exps": f"block_sparse_moe.experts.{{}}.{module[4:]}" for name, module in MLP.items()},
        **{f"{name}_shexp": f"block_sparse_moe.shared_experts.{module[4:]}" for name, module in MLP.items()},
        "ffn_gate_inp": "block_sparse_moe.gate",
        **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
        **{f"ssm_{gate}_{side}": f"self_attn.{gate}_{side}_proj" for gate in "fg" for side in "ab"},
        "ssm_beta": "self_attn.b_proj",
        "ssm_norm": "self_attn.o_norm",
    },
    whole={
        "ssm_a": "self_attn.A_log",
        "ssm_dt.bias": "self_attn.dt_bias",
        "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
    },
    changes={"ssm_a": _by(_log_rates), **{f"ssm_conv1d_{part}.weight": _by(_channels) for part in "qkv"}},
)
_FALCON_H1 = Rules(
    {**ATTENTION, **_mixer("mamba"), **_FEED_FORWARD, "ffn_norm": "pre_ff_layernorm"},
    _HYBRID_MODULES,
    whole={**_mixer_whole("mamba"), "ffn_norm": "pre_ff_layernorm.weight"},
    changes=_MIXER_CHANGES,
)
_JAMBA = Rules(
    {
        **_FALCON_H1.layer,
        **{f"{name}_exps": f"feed_forward.experts.{{}}.{module[4:]}" for name, module in MLP.items()},
        "ffn_gate_inp": "feed_forward.router",
    },
    _HYBRID_MODULES,
    whole=_mixer_whole("mamba", has_heads=False),
    changes=_MIXER_CHANGES,
)
_MAMBA_MODULES = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
_MAMBA2 = Rules(
    {"attn_norm": "norm", **_mixer("mixer")},
    _MAMBA_MODULES,
    "backbone.layers.",
    whole=_mixer_whole("mixer"),
    changes=_MIXER_CHANGES,
)
_NEMOTRON = replace(
    _MAMBA2,
    layer={
        **_MAMBA2.layer,
        **{f"attn_{side}": f"mixer.{side}_proj" for side in "qkv"},
        "attn_output": "mixer.o_proj",
        **{f"ffn_{side}": f"mixer.{side}_proj" for side in ("up", "down")},
        **{f"ffn_{side}_exps": f"mixer.experts.{{}}.{side}_proj" for side in ("up", "down")},
        **{f"ffn_{side}_shexp": f"mixer.shared_experts.{side}_proj" for side in ("up", "down")},
        "ffn_gate_inp": "mixer.gate",
    },
    pairs=True,
    whole={**_MAMBA2.whole, "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
)
_W = dict(zip(MLP, ("w1", "w3", "w2"), strict=True))
_LFM2 = Rules(
    {
        **ATTENTION,
        "attn_norm": "operator_norm",
        "attn_output": "self_attn.out_proj",
        **{f"attn_{side}_norm": f"self_attn.{side}_layernorm" for side in ("q", "k")},
        **{name: f"feed_forward.{projection}" for name, projection in _W.items()},
        **{f"{name}_exps": f"feed_forward.experts.{{}}.{projection}" for name, projection in _W.items()},
        "ffn_gate_inp": "feed_forward.gate",
        "ffn_norm": "ffn_norm",
        **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
    },
    {**DECODER, **dict.fromkeys(("token_embd_norm", "output_norm"), "model.embedding_norm")},
    whole={"exp_probs_b.bias": "feed_forward.expert_bias"},
)
_MINIMAX01 = Rules(
    {
        **LLAMA,
        "attn_norm_2": "self_attn.norm",
        "attn_gate": "self_attn.output_gate",
        "ffn_gate_inp": "block_sparse_moe.gate",
        **{f"{name}_exps": f"block_sparse_moe.experts.{{}}.{projection}" for name, projection in _W.items()},
    }
)
_RULES = {
    "falcon-h1": _FALCON_H1,
    "granitehybrid": _GRANITE,
    "jamba": _JAMBA,
    "kimi-linear": _KIMI,
    "lfm2": _LFM2,
    "lfm2moe": _LFM2,
    "mamba": replace(_MAMBA2, whole=_mixer_whole("mixer", has_heads=False)),
    "mamba2": _MAMBA2,
    "minimax-01": _MINIMAX01,
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35,
    "qwen3next": _QWEN3_NEXT,
}


def hybrid_rules(facts: GgufFacts) -> Rules | None:
    """The rules of a model with states; None: it has none."""
    if is_bamba(facts):
        return _BAMBA
    return _RULES.get(facts.architecture)
