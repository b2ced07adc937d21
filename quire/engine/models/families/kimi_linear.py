"""Kimi Linear: Kimi Delta Attention, and every fourth layer latent attention without a position embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.deepseek import grouped_router
from quire.engine.models.families.llama import LLAMA, decoder, mixed_layers, mlp
from quire.engine.models.families.olmo_hybrid import join_convolutions
from quire.engine.models.families.qwen3_next import check_silu
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import (
    DecoderSpec,
    FeedForward,
    GatedExperts,
    LatentAttention,
    Layer,
    MoE,
)
from quire.engine.models.specs.delta_net import GatedDeltaNet
from quire.engine.models.specs.tensor_names import KIND, LAYER, taps_first

_ATTENTION = LAYER + r"self_attn\."
_GATE = _ATTENTION + r"(?:forget_gate\.)?"
_MLP = LAYER + r"block_sparse_moe\."  # transformers also saves dense ones under this name
_RULES = (
    (_GATE + r"f_(?P<side>a|b)_proj" + KIND, "attn.decay.{side}.{kind}"),
    (_GATE + r"A_log", "attn.log_rate"),
    (_GATE + r"dt_bias", "attn.decay_bias"),
    (_ATTENTION + r"g_(?P<side>a|b)_proj" + KIND, "attn.z.{side}.{kind}"),
    (_ATTENTION + r"b_proj" + KIND, "attn.gates.{kind}"),
    (_ATTENTION + r"conv1d\.weight", "attn.conv"),
    (_ATTENTION + r"o_norm\.weight", "attn.norm"),
    (_MLP + r"gate\.e_score_correction_bias", "ffn.score_bias"),
    (_MLP + r"(?P<part>gate|up)_proj" + KIND, "ffn.gate_up.{kind}"),
    (_MLP + r"down_proj" + KIND, "ffn.down.{kind}"),
    (_MLP + r"shared_experts\.(?P<part>gate|up)_proj" + KIND, "ffn.shared.gate_up.{kind}"),
    (_MLP + r"shared_experts\.down_proj" + KIND, "ffn.shared.down.{kind}"),
)


def kimi_linear(config: Any) -> DecoderSpec:
    """Kimi Linear, with experts behind the first layers."""
    check_silu(config)
    linear = GatedDeltaNet(
        key_heads=config.linear_num_heads,
        heads=config.linear_num_heads,
        key_dim=config.linear_head_dim,
        value_dim=config.linear_head_dim,
        width=config.linear_conv_kernel_dim,
        eps=config.rms_norm_eps,
        rank=config.linear_head_dim,
        gate="sigmoid",
    )
    full = LatentAttention(
        heads=config.num_attention_heads,
        q_rank=config.q_lora_rank,
        kv_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        shared_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        scale=(config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5,
        rope=None,
        bias=bool(config.attention_bias),
    )
    layers = [
        Layer(attn=attn, ffn=ffn)
        for attn, ffn in zip(mixed_layers(config, linear, full), _feed_forwards(config), strict=True)
    ]
    return decoder(config, layers)


def _feed_forwards(config: Any) -> list[FeedForward]:
    experts = MoE(
        size=config.moe_intermediate_size,
        experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        router=grouped_router(config),
        expert=GatedExperts(act=config.hidden_act),
        shared=config.moe_intermediate_size * config.n_shared_experts,
    )
    kinds: dict[str, FeedForward] = {"sparse": experts, "dense": mlp(config)}
    for kind in sorted(set(config.mlp_layer_types) - set(kinds)):
        raise UnsupportedModel(f"feed-forwards of type {kind!r} are not supported; supported are dense and sparse")
    return [kinds[kind] for kind in config.mlp_layer_types]


FAMILIES = (
    Family(
        name="kimi_linear",
        config_types=("kimi_linear",),
        spec=kimi_linear,
        tensors=replace(
            LLAMA,
            rules=(*_RULES, *LLAMA.rules),
            convert={"attn.conv": taps_first, "attn.log_rate": lambda rate: rate.flatten()},
            prepare=join_convolutions,
        ),
    ),
)
