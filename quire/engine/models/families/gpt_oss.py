"""gpt-oss."""

from __future__ import annotations

from typing import Any

from quire.engine.models.families.llama import LLAMA, biased_attention, decoder, windowed
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import ClampedSwigluExperts, DecoderSpec, Layer, MoE, SoftmaxRouter


def gpt_oss(config: Any) -> DecoderSpec:
    """gpt-oss: attention sinks, alternating sliding windows, clamped experts with biases."""
    experts = MoE(
        size=config.intermediate_size,
        experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        router=SoftmaxRouter(bias=True),  # softmax over the selected logits, which is equal to renormalizing
        expert=ClampedSwigluExperts(
            alpha=getattr(config, "swiglu_alpha", 1.702), limit=getattr(config, "swiglu_limit", 7.0)
        ),
    )
    attns = windowed(config, biased_attention(config, sinks=True))
    return decoder(config, [Layer(attn=attn, ffn=experts) for attn in attns])


FAMILIES = (Family(name="gpt_oss", config_types=("gpt_oss",), spec=gpt_oss, tensors=LLAMA),)
