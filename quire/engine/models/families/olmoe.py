"""OLMoE, and FlexOlmo."""

from __future__ import annotations

from typing import Any

from quire.engine.models.errors import UnsupportedOption
from quire.engine.models.families.llama import LLAMA, LLAMA_OUTPUT_NORMS, biased_attention, uniform
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec, GatedExperts, MoE, QKNorm, SoftmaxRouter


def _experts(config: Any) -> MoE:
    return MoE(
        size=config.intermediate_size,
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        router=SoftmaxRouter(renormalize=config.norm_topk_prob),
        expert=GatedExperts(act=config.hidden_act),
    )


def olmoe(config: Any) -> DecoderSpec:
    """OLMoE: norms of all heads together.

    Raises:
        UnsupportedOption: queries, keys and values are clipped.
    """
    if config.clip_qkv is not None:
        raise UnsupportedOption("clip_qkv is not supported for OLMoE")
    return uniform(config, biased_attention(config, qk_norm=QKNorm.ALL), _experts(config))


def flex_olmo(config: Any) -> DecoderSpec:
    """FlexOlmo: OLMo 2 with experts."""
    attn = biased_attention(config, qk_norm=QKNorm.ALL)
    return uniform(config, attn, _experts(config), pre_norm=False, branch_output_norm=True)


FAMILIES = (
    Family(name="flex_olmo", config_types=("flex_olmo",), spec=flex_olmo, tensors=LLAMA_OUTPUT_NORMS),
    Family(name="olmoe", config_types=("olmoe",), spec=olmoe, tensors=LLAMA),
)
