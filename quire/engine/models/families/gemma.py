"""Gemma: scaled embeddings; 2 and 3 have norms before and after each branch, and alternating sliding windows."""

from __future__ import annotations

from typing import Any

from quire.engine.models.config.bidirectional import is_not_causal
from quire.engine.models.config.rope import rope_of
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.llama import (
    LLAMA,
    LLAMA_OUTPUT_NORMS,
    biased_attention,
    check_layer_types,
    decoder,
    mlp,
)
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec, Embeddings, Layer, QKNorm


def gemma(config: Any) -> DecoderSpec:
    """Gemma 1."""
    layer = Layer(attn=biased_attention(config), ffn=mlp(config))
    return decoder(
        config,
        [layer] * config.num_hidden_layers,
        norm_offset=1.0,
        embeddings=Embeddings(scale=config.hidden_size**0.5, scales_items=False),
    )


def gemma2(config: Any) -> DecoderSpec:
    """Gemma 2: softcapped attention scores and logits."""
    return _gemma(config, softcap=config.attn_logit_softcapping)


def gemma3(config: Any) -> DecoderSpec:
    """Gemma 3, text: normalized queries and keys, RoPE parameters per layer type."""
    return _gemma(config, qk_norm=QKNorm.HEAD)  # `attn_logit_softcapping` has no effect


def _gemma(config: Any, **overrides: Any) -> DecoderSpec:
    check_layer_types(config)
    per_type = "full_attention" in config.rope_parameters
    attn_of = {
        kind: biased_attention(
            config,
            scale=config.query_pre_attn_scalar**-0.5,
            rope=rope_of(config, config.head_dim, kind if per_type else None),
            window=config.sliding_window if kind == "sliding_attention" else None,
            **overrides,
        )
        for kind in sorted(set(config.layer_types))
    }
    ffn = mlp(config, act=config.hidden_activation)
    return decoder(
        config,
        [Layer(attn=attn_of[kind], ffn=ffn, branch_output_norm=True) for kind in config.layer_types],
        norm_offset=1.0,
        embeddings=Embeddings(scale=config.hidden_size**0.5, scales_items=False),
        logit_softcap=config.final_logit_softcapping,
    )


def _is_bidirectional(config: Any) -> bool:
    return is_not_causal(config) or bool(getattr(config, "use_bidirectional_attention", False))


def _early_is_bidirectional(config: Any) -> bool:
    """Raise UnsupportedModel for a flag with which transformers' masks stay causal in Gemma 1 and 2."""
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel(
            f"use_bidirectional_attention is not supported in models of type {config.model_type!r}, whose masks stay "
            "causal; is_causal false makes attention bidirectional"
        )
    return is_not_causal(config)


FAMILIES = (
    Family(
        name="gemma",
        config_types=("gemma",),
        spec=gemma,
        tensors=LLAMA,
        is_bidirectional=_early_is_bidirectional,
    ),
    Family(
        name="gemma2",
        config_types=("gemma2",),
        spec=gemma2,
        tensors=LLAMA_OUTPUT_NORMS,
        is_bidirectional=_early_is_bidirectional,
    ),
    Family(
        name="gemma3_text",
        config_types=("gemma3_text",),
        spec=gemma3,
        tensors=LLAMA_OUTPUT_NORMS,
        is_bidirectional=_is_bidirectional,
    ),
)
