"""Qwen 1.5 and 2 with experts."""

from __future__ import annotations

from typing import Any

from quire.engine.models.families.llama import LLAMA, attention, decoder, windowed
from quire.engine.models.families.qwen3_moe import feed_forwards
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec, GatedExperts, Layer, MoE, SoftmaxRouter


def qwen2_moe(config: Any) -> DecoderSpec:
    """Qwen 2 with experts, and a shared one whose result each token scales."""
    experts = MoE(
        size=config.moe_intermediate_size,
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        router=SoftmaxRouter(renormalize=config.norm_topk_prob),
        expert=GatedExperts(act=config.hidden_act),
        shared=config.shared_expert_intermediate_size,
        shared_gate=True,
    )
    attns = windowed(config, attention(config, qkv_bias=bool(config.qkv_bias)))
    layers = zip(attns, feed_forwards(config, experts), strict=True)
    return decoder(config, [Layer(attn=attn, ffn=ffn) for attn, ffn in layers])


FAMILIES = (Family(name="qwen2_moe", config_types=("qwen2_moe",), spec=qwen2_moe, tensors=LLAMA),)
