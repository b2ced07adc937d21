"""Gemma 3n and 4: embeddings of layers, keys and values that later layers share, experts beside a feed-forward."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.engine.models.config.bidirectional import is_not_causal
from quire.engine.models.config.rope import rope_of
from quire.engine.models.errors import UnsupportedModel, UnsupportedOption
from quire.engine.models.families.llama import LLAMA_OUTPUT_NORMS, check_layer_types, decoder, mlp
from quire.engine.models.family import Facts, Family
from quire.engine.models.specs.decoder import (
    Attention,
    DecoderSpec,
    Embeddings,
    FeedForward,
    GatedExperts,
    GatedMLP,
    GroupedQueryAttention,
    Layer,
    MoE,
    QKNorm,
    SoftmaxRouter,
)
from quire.engine.models.specs.layer_inputs import LayerEmbeddings, LayerInput, Streams
from quire.engine.models.specs.shared_keys import SharedKeysAttention
from quire.engine.models.specs.stacked_experts import unstacked
from quire.engine.models.specs.tensor_names import KIND, LAYER, NamedTensors, WeightNames

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

_KEYS = re.compile(r"(?P<attn>(?!vision\.)(?:.*\.)?layers\.(?P<layer>\d+)\.self_attn)\.k_proj\.(?P<kind>.*)")
_EXPERTS = LAYER + r"experts\.(?P<expert>\d+)\."
_RULES = (
    (LAYER + r"self_attn\.q_proj" + KIND, "attn.q.{kind}"),  # of layers without keys
    *LLAMA_OUTPUT_NORMS.rules,
    (r"embed_tokens_per_layer\.weight", "layer_embeddings.table.weight"),
    (r"per_layer_model_projection\.weight", "layer_embeddings.projection.weight"),
    (r"per_layer_projection_norm\.weight", "layer_embeddings.norm.weight"),
    (LAYER + r"per_layer_input_gate\.weight", "layer_input.gate.weight"),
    (LAYER + r"per_layer_projection\.weight", "layer_input.projection.weight"),
    (LAYER + r"post_per_layer_input_norm\.weight", "layer_input.norm.weight"),
    (LAYER + r"layer_scalar", "output_scale.factor"),
    # Experts beside a feed-forward, which is their shared expert here.
    (LAYER + r"mlp\.(?P<part>gate|up)_proj\.weight", "ffn.shared.gate_up.weight"),
    (LAYER + r"mlp\.down_proj\.weight", "ffn.shared.down.weight"),
    (LAYER + r"pre_feedforward_layernorm\.weight", "ffn.norms.shared.weight"),
    (LAYER + r"post_feedforward_layernorm_1\.weight", "ffn.norms.shared_output.weight"),
    (LAYER + r"pre_feedforward_layernorm_2\.weight", "ffn.norms.experts.weight"),
    (LAYER + r"post_feedforward_layernorm_2\.weight", "ffn.norms.experts_output.weight"),
    (LAYER + r"router\.scale", "ffn.norms.router.weight"),
    (LAYER + r"router\.per_expert_scale", "ffn.expert_scale"),
    (LAYER + r"router\.proj\.weight", "ffn.router.weight"),
    (_EXPERTS + r"(?P<part>gate|up)_proj\.weight", "ffn.experts.{expert}.gate_up.weight"),
    (_EXPERTS + r"down_proj\.weight", "ffn.experts.{expert}.down.weight"),
    # Several hidden states of a token.
    (LAYER + r"laurel\.linear_left\.weight", "side.a.weight"),
    (LAYER + r"laurel\.linear_right\.weight", "side.b.weight"),
    (LAYER + r"laurel\.post_laurel_norm\.weight", "side.norm.weight"),
    (LAYER + r"altup\.correct_output_scale", "streams.output_scale"),
    (LAYER + r"altup\.correction_coefs\.weight", "streams.correction"),
    (LAYER + r"altup\.prediction_coefs\.weight", "streams.prediction"),
    (LAYER + r"altup\.modality_router\.weight", "streams.router.weight"),
    (LAYER + r"altup\.router_norm\.weight", "streams.router_norm.weight"),
    *((rf"altup_projections\.{index}\.weight", f"stream_ends.expand.{index}.weight") for index in range(8)),
    *((rf"altup_unembed_projections\.{index}\.weight", f"stream_ends.merge.{index}.weight") for index in range(8)),
)
_MOST_STREAMS = 9  # of which the rules have names
# Checkpoints have projections of keys and values also for layers that do not use them.
_IGNORED = rf"{LLAMA_OUTPUT_NORMS.ignored}|layers\.\d+\.self_attn\.[kv]_(?:proj|norm)\..*"


def gemma4(config: Any) -> DecoderSpec:
    """Gemma 4, text."""
    size = getattr(config, "hidden_size_per_layer_input", None)
    modes = _sharing(config)
    attns = _attentions(config, modes)
    ffns = [_feed_forward(config, is_wide=mode is not None and config.use_double_wide_mlp) for mode in modes]
    layer_input = LayerInput(size=size, act=config.hidden_activation) if size else None
    layers = [
        Layer(attn=attn, ffn=ffn, branch_output_norm=True, layer_input=layer_input, output_scale=True)
        for attn, ffn in zip(attns, ffns, strict=True)
    ]
    return decoder(
        config,
        layers,
        embeddings=Embeddings(scale=config.hidden_size**0.5, scales_items=False),
        logit_softcap=config.final_logit_softcapping,
        layer_embeddings=_layer_embeddings(config, size) if size else None,
    )


def _layer_embeddings(config: Any, size: int) -> LayerEmbeddings:
    item_token = config.pad_token_id or 0
    return LayerEmbeddings(size=size, vocab=config.vocab_size_per_layer_input, item_token=item_token)


def gemma3n(config: Any) -> DecoderSpec:
    """Gemma 3n, text: tokens have several hidden states.

    Raises:
        UnsupportedModel: these are too few or too many, or the active one is not the first; or a sparsity is no part.
    """
    count, active = config.altup_num_inputs, config.altup_active_idx
    if not 2 <= count <= _MOST_STREAMS or active != 0:
        raise UnsupportedModel(
            f"altup_num_inputs is {count!r} and altup_active_idx is {active!r}; supported are 2 to {_MOST_STREAMS}, "
            "and 0"
        )
    if wrong := [part for part in config.activation_sparsity_pattern if not 0 <= part < 1]:
        raise UnsupportedModel(f"activation_sparsity_pattern has {wrong[0]!r}; supported are numbers from 0, below 1")
    size = config.hidden_size_per_layer_input
    streams = Streams(
        count=count, active=active, rank=config.laurel_rank, scales_output=bool(config.altup_correct_scale)
    )
    ffns = [
        replace(_mlp_of_size(config, width), sparsity=float(sparsity))
        for width, sparsity in zip(config.intermediate_size, config.activation_sparsity_pattern, strict=True)
    ]
    layers = [
        Layer(
            attn=attn,
            ffn=ffn,
            branch_output_norm=True,
            layer_input=LayerInput(size=size, act=config.hidden_activation),
            streams=streams,
        )
        for attn, ffn in zip(_attentions(config, _sharing(config)), ffns, strict=True)
    ]
    return decoder(
        config,
        layers,
        embeddings=Embeddings(scale=config.hidden_size**0.5, scales_items=False),
        logit_softcap=config.final_logit_softcapping,
        layer_embeddings=LayerEmbeddings(size=size, vocab=config.vocab_size_per_layer_input),
        streams=streams,
    )


def _sharing(config: Any) -> list[int | None]:
    """The layer whose keys and values each layer reads, by its index; None: its own.

    Raises:
        UnsupportedModel: there is no earlier layer of the same type that has some.
    """
    check_layer_types(config)
    if is_not_causal(config):
        raise UnsupportedOption(
            f"attention in both directions is not supported for models of type {config.model_type!r}"
        )
    kinds, unshared = list(config.layer_types), config.num_hidden_layers - config.num_kv_shared_layers
    if (
        len(kinds) != config.num_hidden_layers
        or not 0 < unshared <= len(kinds)
        or not set(kinds[unshared:]) <= set(kinds[:unshared])
    ):
        raise UnsupportedModel(
            f"num_kv_shared_layers is {config.num_kv_shared_layers!r}: the last layers cannot share keys and values of "
            f"earlier ones of the same type in layer_types, {kinds!r}"
        )
    last = {kind: index for index, kind in enumerate(kinds[:unshared])}
    return [*([None] * unshared), *(last[kind] for kind in kinds[unshared:])]


def _attentions(config: Any, sharing: Sequence[int | None]) -> list[Attention]:
    sizes = getattr(config, "per_layer_config", None)
    return [
        _attention(config, config if sizes is None else sizes[index], kind, source)
        for index, (kind, source) in enumerate(zip(config.layer_types, sharing, strict=True))
    ]


def _attention(config: Any, sizes: Any, kind: str, source: int | None) -> Attention:
    """The attention of a layer. `sizes`: a config with the layer's numbers; `source`: see `_sharing`."""
    bias, window = bool(config.attention_bias), config.sliding_window if kind == "sliding_attention" else None
    fields: dict[str, Any] = {
        "heads": config.num_attention_heads,
        "kv_heads": sizes.num_key_value_heads,
        "head_dim": sizes.head_dim,
        "scale": 1.0,
        "rope": rope_of(config, sizes.head_dim, kind),
        "window": window,
        "out_bias": bias,
    }
    if source is not None:
        return SharedKeysAttention(**fields, source=source, qk_norm=True, q_bias=bias)
    keys_as_values = window is None and bool(getattr(config, "attention_k_eq_v", False))
    return GroupedQueryAttention(
        **fields, qkv_bias=bias, qk_norm=QKNorm.HEAD, value_norm=True, keys_as_values=keys_as_values
    )


def _mlp_of_size(config: Any, size: int) -> GatedMLP:
    """A feed-forward of a width."""
    return replace(mlp(config, act=config.hidden_activation), size=size)


def _feed_forward(config: Any, *, is_wide: bool) -> FeedForward:
    dense = _mlp_of_size(config, config.intermediate_size * (2 if is_wide else 1))
    if not getattr(config, "enable_moe_block", False):
        return dense
    return MoE(
        size=config.moe_intermediate_size,
        experts=config.num_experts,
        top_k=config.top_k_experts,
        router=SoftmaxRouter(),
        expert=GatedExperts(act=config.hidden_activation),
        shared=dense.size,
        branch_norms=True,
        expert_scale=True,
    )


def _names(spec: DecoderSpec, _: Facts) -> WeightNames:
    doubled = {
        index
        for index, layer in enumerate(spec.layers)
        if isinstance(layer.attn, GroupedQueryAttention) and layer.attn.keys_as_values
    }

    def prepare(tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in unstacked(r"layers\.\d+")(tensors):
            yield name, tensor
            match = _KEYS.fullmatch(name)
            if match is not None and int(match["layer"]) in doubled:
                yield f"{match['attn']}.v_proj.{match['kind']}", tensor

    return WeightNames(_RULES, ignored=_IGNORED, convert={"ffn.norms.router.weight": _router_gains}, prepare=prepare)


def _router_gains(scale: Tensor) -> Tensor:
    """The weight of the router's norm, whose results are divided by the root of their number."""
    gains: Tensor = scale * len(scale) ** -0.5
    return gains


FAMILIES = (
    Family(name="gemma3n_text", config_types=("gemma3n_text",), spec=gemma3n, tensors=_names),
    Family(name="gemma4_text", config_types=("gemma4_text", "gemma4_unified_text"), spec=gemma4, tensors=_names),
)
