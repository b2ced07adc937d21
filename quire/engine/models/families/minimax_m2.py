"""MiniMax-M2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.models.config.rope import rope_of
from quire.engine.models.families.llama import LLAMA, attention, head_dim, uniform
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec, GatedExperts, GroupedSigmoidRouter, MoE, QKNorm


def minimax_m2(config: Any) -> DecoderSpec:
    """MiniMax-M2: norms of all heads together, a partial rope, experts that are selected with a bias."""
    experts = MoE(
        size=config.intermediate_size,
        experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        router=GroupedSigmoidRouter(groups=1, top_groups=1, renormalize=True, scale=1.0),
        expert=GatedExperts(act=config.hidden_act),
    )
    rope = rope_of(config, head_dim(config), partial=True)
    return uniform(config, attention(config, qk_norm=QKNorm.ALL, rope=rope), experts)


FAMILIES = (
    Family(
        name="minimax_m2",
        config_types=("minimax_m2",),
        spec=minimax_m2,
        tensors=replace(LLAMA, ignored=rf"{LLAMA.ignored}|mtp\..*"),
    ),
)
