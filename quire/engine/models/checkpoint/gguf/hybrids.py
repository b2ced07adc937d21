"""Configs of models with states: state spaces, the gated delta rule, short convolutions; alone and beside attention.

As in `architectures`, what llama.cpp has in code is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from quire.engine.models.checkpoint.gguf.decoder_config import (
    EMBEDDING,
    HEAD,
    Config,
    decoder,
    granite_decoder,
    num_layers,
    rms_decoder,
    special_tokens,
)
from quire.engine.models.checkpoint.gguf.facts import GgufFacts
from quire.engine.models.checkpoint.gguf.rope import partial_rope, rope_of
from quire.engine.models.errors import BrokenFolder, UnsupportedModel

_LINEAR, _FULL = "linear_attention", "full_attention"
_KV_HEADS, _FEED_FORWARD = ".attention.head_count_kv", ".feed_forward_length"
_SIGMOID = 2  # value of expert_gating_func


def kv_heads_of(facts: GgufFacts) -> int:
    """Heads of keys of the layers with attention, which must have the same number; 1 if there are none.

    Raises:
        UnsupportedModel: the numbers differ.
    """
    counts = {count for count in facts.by_layer(_KV_HEADS, num_layers(facts)) if count}
    if len(counts) > 1:
        raise UnsupportedModel(
            f"{facts.file}: {facts.architecture}{_KV_HEADS} has different numbers of heads, which is not supported"
        )
    return max(counts, default=1)


def _types(facts: GgufFacts) -> list[str]:
    """Types of layers. Those without heads of keys have a state."""
    return [_FULL if count else _LINEAR for count in facts.by_layer(_KV_HEADS, num_layers(facts))]


def _uniform(facts: GgufFacts, **values: int) -> GgufFacts:
    """Facts with one number of key heads for all layers, and other `values` by their keys."""
    numbers = {_KV_HEADS: kv_heads_of(facts), **values}
    metadata = {**facts.metadata, **{facts.architecture + key: number for key, number in numbers.items()}}
    return replace(facts, metadata=metadata)


def _share(facts: GgufFacts, key: str, count: int) -> int:
    """The integer under a key divided by a count.

    Raises:
        BrokenFolder: the quotient is no integer above 0.
    """
    whole = facts.integer(key)
    if count < 1 or whole < 1 or whole % count:
        raise BrokenFolder(f"{facts.file}: {facts.architecture}{key} must be a multiple of {count}, not {whole}")
    return whole // count


def _has(facts: GgufFacts, module: str) -> bool:
    """Whether some layer has a tensor."""
    return any(name.endswith(f".{module}") for name in facts.shapes)


def _types_by_flags(facts: GgufFacts, period: int) -> list[str]:
    """Types of layers: as the file says, or every `period`-th has no state.

    Raises:
        BrokenFolder: the file says it of fewer layers.
    """
    layers = num_layers(facts)
    flags = list(facts.sequence(".attention.recurrent_layers"))[:layers]
    period = facts.optional_integer(".full_attention_interval") or period
    if not flags:
        flags = [(index + 1) % period != 0 for index in range(layers)]
    if len(flags) < layers:
        raise BrokenFolder(
            f"{facts.file}: {facts.architecture}.attention.recurrent_layers has {len(flags)} values for {layers} layers"
        )
    return [_LINEAR if flag else _FULL for flag in flags]


def _delta_net(facts: GgufFacts) -> Config:
    """What the configs of models with the gated delta rule have. Files name its sizes as those of a state space."""
    heads = facts.integer(".ssm.time_step_rank")
    return {
        "head_dim": facts.head_dim,
        "attention_bias": _has(facts, "attn_q.bias"),
        "layer_types": _types_by_flags(facts, 4),
        "linear_conv_kernel_dim": facts.integer(".ssm.conv_kernel"),
        "linear_num_key_heads": heads // value_heads_by_key(facts),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": facts.integer(".ssm.state_size"),
        "linear_value_head_dim": _share(facts, ".ssm.inner_size", heads),
        "rope_parameters": partial_rope(facts, rope_of(facts)),
    }


def value_heads_by_key(facts: GgufFacts) -> int:
    """How many heads of values share a key in the gated delta rule."""
    return _share(facts, ".ssm.time_step_rank", facts.integer(".ssm.group_count"))


def _delta_net_experts(facts: GgufFacts) -> Config:
    return {
        "num_experts": facts.integer(".expert_count"),
        "num_experts_per_tok": facts.integer(".expert_used_count"),
        "moe_intermediate_size": facts.integer(".expert_feed_forward_length"),
        "shared_expert_intermediate_size": facts.integer(".expert_shared_feed_forward_length"),
    }


def _qwen35(facts: GgufFacts) -> Config:
    """Qwen 3.5 and 3.6, dense, without pictures, and with them: see `projector`."""
    return rms_decoder(facts, "qwen3_5_text", "Qwen3_5", **_delta_net(facts))


def _qwen35moe(facts: GgufFacts) -> Config:
    fields = {**_delta_net(facts), **_delta_net_experts(facts)}
    config = rms_decoder(facts, "qwen3_5_moe_text", "Qwen3_5Moe", **fields)
    config.pop("intermediate_size")
    return config


def _qwen3next(facts: GgufFacts) -> Config:
    fields = {**_delta_net(facts), **_delta_net_experts(facts)}
    fields["intermediate_size"] = facts.optional_integer(_FEED_FORWARD) or fields["moe_intermediate_size"]
    return rms_decoder(
        facts, "qwen3_next", "Qwen3Next", norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], **fields
    )


def _mamba2_sizes(facts: GgufFacts) -> Config:
    """The sizes of a state space of heads, as the configs of hybrids name them."""
    heads = facts.integer(".ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": _share(facts, ".ssm.inner_size", heads),
        "mamba_n_groups": facts.integer(".ssm.group_count"),
        "mamba_d_state": facts.integer(".ssm.state_size"),
        "mamba_d_conv": facts.integer(".ssm.conv_kernel"),
        "mamba_conv_bias": _has(facts, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(facts, "ssm_in.bias"),
    }


def _granite_hybrid(facts: GgufFacts) -> Config:
    """Granite 4, whose attention has no positions, and Bamba, whose attention has them."""
    hidden = facts.integer(".embedding_length")
    sizes = {**_mamba2_sizes(facts), "mamba_expand": _share(facts, ".ssm.inner_size", hidden)}
    if is_bamba(facts):
        return _bamba(facts, sizes)
    experts = facts.optional_integer(".expert_count") or 0
    shared = facts.rows("blk.0.ffn_up_shexp.weight" if experts else "blk.0.ffn_up.weight")
    return granite_decoder(
        _uniform(facts),
        "granitemoehybrid",
        "GraniteMoeHybrid",
        **sizes,
        attention_bias=_has(facts, "attn_q.bias"),
        layer_types=_types(facts),
        position_embedding_type="nope",
        shared_intermediate_size=shared,
        num_local_experts=experts,
        num_experts_per_tok=facts.integer(".expert_used_count") if experts else 0,
    )


def is_bamba(facts: GgufFacts) -> bool:
    """Whether a file of the architecture `granitehybrid` has Bamba."""
    return facts.architecture == "granitehybrid" and facts.flag(".rope.scaling.finetuned") is not False


def _bamba(facts: GgufFacts, sizes: Config) -> Config:
    """Bamba. `sizes`: of its state space.

    Raises:
        UnsupportedModel: it has experts.
    """
    if facts.optional_integer(".expert_count"):
        raise UnsupportedModel(f"{facts.file} is a Bamba model with experts, which is not supported")
    return rms_decoder(
        _uniform(facts),
        "bamba",
        "Bamba",
        **sizes,
        attn_layer_indices=[index for index, kind in enumerate(_types(facts)) if kind == _FULL],
        attention_bias=_has(facts, "attn_q.bias"),
        mlp_bias=_has(facts, "ffn_gate.bias"),
        rope_parameters=partial_rope(facts, rope_of(facts)),
    )


def _kimi_linear(facts: GgufFacts) -> Config:
    """Kimi Linear, whose attention is latent and has no positions."""
    layers = num_layers(facts)
    _check_sigmoid(facts)
    keys, heads = facts.integer(".attention.key_length_mla"), facts.integer(".attention.head_count")
    shared = facts.integer(".rope.dimension_count")
    groups, top_groups = _expert_groups(facts)
    dense = facts.optional_integer(".leading_dense_block_count") or 0
    return rms_decoder(
        _uniform(facts),
        "kimi_linear",
        "KimiLinear",
        num_key_value_heads=heads,
        layer_types=_types(facts),
        linear_num_heads=heads,
        linear_head_dim=facts.integer(".kda.head_dim"),
        linear_conv_kernel_dim=facts.integer(".ssm.conv_kernel"),
        q_lora_rank=facts.optional_integer(".attention.q_lora_rank"),
        kv_lora_rank=facts.integer(".attention.kv_lora_rank"),
        qk_rope_head_dim=shared,
        qk_nope_head_dim=keys - shared,
        v_head_dim=facts.integer(".attention.value_length_mla"),
        mlp_layer_types=["dense" if index < dense else "sparse" for index in range(layers)],
        num_local_experts=facts.integer(".expert_count"),
        num_experts_per_tok=facts.integer(".expert_used_count"),
        n_shared_experts=facts.integer(".expert_shared_count"),
        moe_intermediate_size=facts.integer(".expert_feed_forward_length"),
        routed_scaling_factor=facts.optional_number(".expert_weights_scale") or 1.0,
        norm_topk_prob=True,
        n_group=groups,
        topk_group=top_groups,
        attention_bias=False,
    )


def _minimax01(facts: GgufFacts) -> Config:
    """MiniMax 01 and M1. Files have one factor, of what is added to the branches of all layers."""
    factor = facts.optional_number(".residual_scale") or 1.0
    return rms_decoder(
        facts,
        "minimax",
        "MiniMax",
        head_dim=facts.head_dim,
        rotary_dim=facts.optional_integer(".rope.dimension_count") or facts.head_dim,
        layer_types=_types_by_flags(facts, 8),
        num_local_experts=facts.integer(".expert_count"),
        num_experts_per_tok=facts.integer(".expert_used_count"),
        full_attn_alpha_factor=factor,
        linear_attn_alpha_factor=factor,
        mlp_alpha_factor=factor,
    )


def _falcon_h1(facts: GgufFacts) -> Config:
    """Falcon-H1. Its factors are multiplied into the weights of files."""
    return rms_decoder(
        facts,
        "falcon_h1",
        "FalconH1",
        head_dim=facts.head_dim,
        **_mamba2_sizes(facts),
        mamba_d_ssm=facts.integer(".ssm.inner_size"),
        mamba_rms_norm=_has(facts, "ssm_norm.weight"),
        mamba_norm_before_gate=False,
        projectors_bias=_has(facts, "ssm_out.bias"),
        attention_bias=_has(facts, "attn_q.bias"),
        mlp_bias=_has(facts, "ffn_gate.bias"),
    )


def _nemotron_h(facts: GgufFacts) -> Config:
    """Nemotron-H and Nemotron 3, whose layers are one thing alone."""
    layers = num_layers(facts)
    sizes = facts.by_layer(_FEED_FORWARD, layers)
    experts = facts.optional_integer(".expert_count") or 0
    types = [kind if not size else "moe" if experts else "mlp" for kind, size in zip(_types(facts), sizes, strict=True)]
    if len(widths := {size for size in sizes if size}) > 1:
        raise UnsupportedModel(
            f"{facts.file}: {facts.architecture}{_FEED_FORWARD} has different sizes, which is not supported"
        )
    heads = facts.integer(".ssm.time_step_rank")
    eps = facts.optional_number(".attention.layer_norm_rms_epsilon")
    bias = _has(facts, "ssm_in.bias")
    return decoder(
        _uniform(facts, **{_FEED_FORWARD: max(widths, default=0)}),
        "nemotron_h",
        "NemotronH",
        head_dim=facts.head_dim,
        layers_block_type=types,
        layer_norm_epsilon=facts.number(".attention.layer_norm_epsilon") if eps is None else eps,
        attention_bias=_has(facts, "attn_q.bias"),
        mlp_bias=_has(facts, "ffn_up.bias"),
        mlp_hidden_act="relu2",
        use_bias=bias,
        mamba_proj_bias=bias,
        use_conv_bias=_has(facts, "ssm_conv1d.bias"),
        mamba_num_heads=heads,
        mamba_head_dim=_share(facts, ".ssm.inner_size", heads),
        n_groups=facts.integer(".ssm.group_count"),
        ssm_state_size=facts.integer(".ssm.state_size"),
        conv_kernel=facts.integer(".ssm.conv_kernel"),
        **(_nemotron_experts(facts, experts) if experts else {}),
    )


def _nemotron_experts(facts: GgufFacts, experts: int) -> Config:
    groups, top_groups = _expert_groups(facts)
    return {
        "n_routed_experts": experts,
        "n_shared_experts": facts.optional_integer(".expert_shared_count") or 1,
        "num_experts_per_tok": facts.integer(".expert_used_count"),
        "moe_intermediate_size": facts.integer(".expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": facts.integer(".expert_shared_feed_forward_length"),
        "moe_latent_size": facts.optional_integer(".moe_latent_size") or None,
        "norm_topk_prob": bool(facts.flag(".expert_weights_norm")),
        "routed_scaling_factor": facts.optional_number(".expert_weights_scale") or 1.0,
        "n_group": groups,
        "topk_group": top_groups,
    }


def _expert_groups(facts: GgufFacts) -> tuple[int, int]:
    """Groups of experts, and those that a token selects.

    Raises:
        UnsupportedModel: the file has only the first number.
    """
    groups = facts.optional_integer(".expert_group_count") or 1
    top_groups = facts.optional_integer(".expert_group_used_count") or 1
    if groups > 1 and f"{facts.architecture}.expert_group_used_count" not in facts.metadata:
        raise UnsupportedModel(
            f"{facts.file} has experts in {groups} groups, but no {facts.architecture}.expert_group_used_count in its "
            "metadata, so that it is not known how many of them a token selects"
        )
    return groups, top_groups


def _jamba(facts: GgufFacts) -> Config:
    layers, hidden = num_layers(facts), facts.integer(".embedding_length")
    attention = [index for index, kind in enumerate(_types(facts)) if kind == _FULL]
    experts = [index for index in range(layers) if f"blk.{index}.ffn_gate_inp.weight" in facts.shapes]
    attention_period, attention_offset = _rhythm(facts, "attention", attention, layers)
    expert_period, expert_offset = _rhythm(facts, "experts", experts, layers)
    return rms_decoder(
        _uniform(facts),
        "jamba",
        "Jamba",
        mamba_d_state=facts.integer(".ssm.state_size"),
        mamba_d_conv=facts.integer(".ssm.conv_kernel"),
        mamba_expand=_share(facts, ".ssm.inner_size", hidden),
        mamba_dt_rank=facts.integer(".ssm.time_step_rank"),
        mamba_conv_bias=_has(facts, "ssm_conv1d.bias"),
        mamba_proj_bias=_has(facts, "ssm_in.bias"),
        attn_layer_period=attention_period,
        attn_layer_offset=attention_offset,
        num_experts=facts.optional_integer(".expert_count") or 1,
        num_experts_per_tok=facts.optional_integer(".expert_used_count") or 1,
        expert_layer_period=expert_period,
        expert_layer_offset=expert_offset,
    )


def _rhythm(facts: GgufFacts, what: str, indices: Sequence[int], layers: int) -> tuple[int, int]:
    """The period of layers and the first of them, as configs of Jamba have it.

    Raises:
        UnsupportedModel: they have none.
    """
    if not indices:
        return layers + 1, layers
    period = indices[1] - indices[0] if len(indices) > 1 else layers
    if list(indices) != [*range(indices[0], layers, period)] or indices[0] >= period:
        raise UnsupportedModel(
            f"{facts.file} is a Jamba model whose layers with {what} do not come at regular distances, which is not "
            "supported"
        )
    return period, indices[0]


def _states_alone(facts: GgufFacts, model_type: str, head: str, **fields: Any) -> Config:
    """What the configs of Mamba and Mamba 2 have."""
    return {
        "architectures": [f"{head}ForCausalLM"],
        "model_type": model_type,
        "hidden_size": facts.integer(".embedding_length"),
        "num_hidden_layers": num_layers(facts),
        "vocab_size": facts.shape(EMBEDDING)[0],
        "state_size": facts.integer(".ssm.state_size"),
        "conv_kernel": facts.integer(".ssm.conv_kernel"),
        "expand": _share(facts, ".ssm.inner_size", facts.integer(".embedding_length")),
        "layer_norm_epsilon": facts.number(".attention.layer_norm_rms_epsilon"),
        "use_bias": _has(facts, "ssm_in.bias"),
        "use_conv_bias": _has(facts, "ssm_conv1d.bias"),
        "hidden_act": "silu",
        "tie_word_embeddings": HEAD not in facts.shapes,
        **special_tokens(facts),
        **fields,
    }


def _mamba(facts: GgufFacts) -> Config:
    """Mamba, and Falcon Mamba, which has norms without weights inside."""
    is_falcon = bool(facts.flag(".ssm.dt_b_c_rms"))
    return _states_alone(
        facts,
        "falcon_mamba" if is_falcon else "mamba",
        "FalconMamba" if is_falcon else "Mamba",
        intermediate_size=facts.integer(".ssm.inner_size"),
        time_step_rank=facts.integer(".ssm.time_step_rank"),
    )


def _mamba2(facts: GgufFacts) -> Config:
    heads = facts.integer(".ssm.time_step_rank")
    return _states_alone(
        facts,
        "mamba2",
        "Mamba2",
        num_heads=heads,
        head_dim=_share(facts, ".ssm.inner_size", heads),
        n_groups=facts.optional_integer(".ssm.group_count") or 1,
    )


def _lfm2_fields(facts: GgufFacts) -> Config:
    return {
        "norm_eps": facts.number(".attention.layer_norm_rms_epsilon"),
        "conv_L_cache": facts.integer(".shortconv.l_cache"),
        "conv_bias": _has(facts, "shortconv.conv.bias"),
        "layer_types": [_FULL if kind == _FULL else "conv" for kind in _types(facts)],
    }


def _lfm2(facts: GgufFacts) -> Config:
    """LFM2, dense. Files have the size that `block_auto_adjust_ff_dim` makes."""
    return decoder(_uniform(facts), "lfm2", "Lfm2", block_auto_adjust_ff_dim=False, **_lfm2_fields(facts))


def _lfm2moe(facts: GgufFacts) -> Config:
    _check_sigmoid(facts)
    return decoder(
        _uniform(facts),
        "lfm2_moe",
        "Lfm2Moe",
        **_lfm2_fields(facts),
        num_dense_layers=facts.optional_integer(".leading_dense_block_count") or 0,
        num_experts=facts.integer(".expert_count"),
        num_experts_per_tok=facts.integer(".expert_used_count"),
        moe_intermediate_size=facts.integer(".expert_feed_forward_length"),
        use_expert_bias=True,
        norm_topk_prob=True,
        routed_scaling_factor=facts.optional_number(".expert_weights_scale") or 1.0,
    )


def _check_sigmoid(facts: GgufFacts) -> None:
    """Raise UnsupportedModel for a router other than a sigmoid."""
    if (function := facts.optional_integer(".expert_gating_func")) not in (None, _SIGMOID):
        raise UnsupportedModel(
            f"{facts.file}: {facts.architecture}.expert_gating_func is {function}, which is not supported; supported "
            f"is {_SIGMOID} (sigmoid)"
        )


HYBRIDS: dict[str, Callable[[GgufFacts], Config]] = {
    "falcon-h1": _falcon_h1,
    "granitehybrid": _granite_hybrid,
    "jamba": _jamba,
    "kimi-linear": _kimi_linear,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2moe,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "minimax-01": _minimax01,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35moe,
    "qwen3next": _qwen3next,
}
