"""Llama 4: attention within chunks, layers without a rope, experts whose inputs are weighed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.models.config.rope import rope_of
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.llama import LLAMA, biased_attention, decoder, head_dim
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import (
    DecoderSpec,
    FeedForward,
    GatedExperts,
    GatedMLP,
    GroupedQueryAttention,
    Layer,
    MoE,
    QKNorm,
    QueryTemperature,
    SigmoidRouter,
)
from quire.engine.models.specs.stacked_experts import unstacked
from quire.engine.models.specs.tensor_names import KIND, LAYER

_FFN = LAYER + r"feed_forward\."
_EXPERT = _FFN + r"experts\.(?P<expert>\d+)\."
_RULES = (
    (_FFN + r"(?P<part>gate|up)_proj" + KIND, "ffn.gate_up.{kind}"),
    (_FFN + r"down_proj" + KIND, "ffn.down.{kind}"),
    (_FFN + r"router\.weight", "ffn.router.weight"),
    (_FFN + r"shared_expert\.(?P<part>gate|up)_proj\.weight", "ffn.shared.gate_up.weight"),
    (_FFN + r"shared_expert\.down_proj\.weight", "ffn.shared.down.weight"),
    (_EXPERT + r"(?P<part>gate|up)_proj\.weight", "ffn.experts.{expert}.gate_up.weight"),
    (_EXPERT + r"down_proj\.weight", "ffn.experts.{expert}.down.weight"),
)
_KINDS = ("chunked_attention", "full_attention")


def llama4_text(config: Any) -> DecoderSpec:
    """The language model of Llama 4.

    Raises:
        UnsupportedModel: there are layers of another type, or chunks without a size.
    """
    for kind in sorted(set(config.layer_types) - set(_KINDS)):
        raise UnsupportedModel(f"layers of type {kind!r} are not supported; supported are {' and '.join(_KINDS)}")
    if "chunked_attention" in config.layer_types and config.attention_chunk_size is None:
        raise UnsupportedModel("layers of type chunked_attention need attention_chunk_size, the tokens of a chunk")
    layers = [
        Layer(attn=_attention(config, kind, has_rope=bool(has_rope)), ffn=_feed_forward(config, index))
        for index, (kind, has_rope) in enumerate(
            zip(config.layer_types, config.no_rope_layers[: config.num_hidden_layers], strict=True)
        )
    ]
    return decoder(config, layers)


def _attention(config: Any, kind: str, *, has_rope: bool) -> GroupedQueryAttention:
    chunk = config.attention_chunk_size if kind == "chunked_attention" else None
    if has_rope:
        rope = rope_of(config, head_dim(config), interleaved=True)
        # Norms without weights commute with rotations, so that these may follow.
        return biased_attention(
            config, chunk=chunk, rope=rope, qk_norm=QKNorm.HEAD_ONLY if config.use_qk_norm else None
        )
    growth = QueryTemperature(growth=config.attn_scale, length=config.floor_scale, offset=1)
    return biased_attention(
        config, chunk=chunk, rope=None, temperature=growth if config.attn_temperature_tuning else None
    )


def _feed_forward(config: Any, index: int) -> FeedForward:
    if index not in config.moe_layers:
        return GatedMLP(size=config.intermediate_size_mlp, act=config.hidden_act)
    return MoE(
        size=config.intermediate_size,
        experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        router=SigmoidRouter(),
        expert=GatedExperts(act=config.hidden_act),
        shared=config.intermediate_size,
        weighs_inputs=True,
    )


FAMILIES = (
    Family(
        name="llama4_text",
        config_types=("llama4_text",),
        spec=llama4_text,
        tensors=replace(
            LLAMA, rules=(*LLAMA.rules, *_RULES), prepare=unstacked("feed_forward", inputs_first=lambda _, __: True)
        ),
    ),
)
