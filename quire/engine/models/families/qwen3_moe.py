"""Qwen 3 with experts."""

from __future__ import annotations

from typing import Any

from quire.engine.models.families.llama import LLAMA, biased_attention, decoder, mlp
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec, GatedExperts, Layer, MoE, QKNorm, SoftmaxRouter


def qwen3_moe(config: Any) -> DecoderSpec:
    """Qwen 3 with experts, on every `decoder_sparse_step`-th layer that is not listed as dense."""
    experts = MoE(
        size=config.moe_intermediate_size,
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        router=SoftmaxRouter(renormalize=config.norm_topk_prob),
        expert=GatedExperts(act=config.hidden_act),
    )
    window = config.sliding_window if config.use_sliding_window else None
    attn = biased_attention(config, qk_norm=QKNorm.HEAD, window=window)
    dense = set(config.mlp_only_layers or ()) if config.num_experts else set(range(config.num_hidden_layers))
    sparse = [i not in dense and (i + 1) % config.decoder_sparse_step == 0 for i in range(config.num_hidden_layers)]
    return decoder(config, [Layer(attn=attn, ffn=experts if is_sparse else mlp(config)) for is_sparse in sparse])


FAMILIES = (Family(name="qwen3_moe", config_types=("qwen3_moe",), spec=qwen3_moe, tensors=LLAMA),)
