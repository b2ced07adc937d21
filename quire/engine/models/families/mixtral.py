"""Mixtral: Mistral with experts."""

from __future__ import annotations

from typing import Any

from quire.engine.models.families.llama import LLAMA, attention, uniform
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec, GatedExperts, MoE, SoftmaxRouter


def softmax_experts(config: Any) -> MoE:
    """Experts of which those with the largest logits are chosen, weighted by a softmax over these."""
    return MoE(
        size=config.intermediate_size,
        experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        router=SoftmaxRouter(),
        expert=GatedExperts(act=config.hidden_act),
    )


def mixtral(config: Any) -> DecoderSpec:
    """Mixtral: Mistral with experts."""
    return uniform(config, attention(config, window=config.sliding_window), softmax_experts(config))


FAMILIES = (Family(name="mixtral", config_types=("mixtral",), spec=mixtral, tensors=LLAMA),)
