"""Gemma 2 and 3: norms before and after each branch, scaled embeddings, alternating sliding windows."""

from __future__ import annotations

from typing import Any

from quire.engine.models.archs.llama import attention, decoder, mlp
from quire.engine.models.archs.rope import rope_of
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.spec import DecoderSpec, Layer, QKNorm


def gemma2(config: Any) -> DecoderSpec:
    """Gemma 2: softcapped attention scores and logits."""
    return _gemma(config, softcap=config.attn_logit_softcapping)


def gemma3(config: Any) -> DecoderSpec:
    """Gemma 3, text: normalized queries and keys, RoPE parameters per layer type."""
    return _gemma(config, softcap=config.attn_logit_softcapping, qk_norm=QKNorm.HEAD)


def _gemma(config: Any, **overrides: Any) -> DecoderSpec:
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModel("gemma with bidirectional attention is an encoder, not a decoder")
    per_type = "full_attention" in config.rope_parameters
    attn_of = {
        kind: attention(
            config,
            scale=config.query_pre_attn_scalar**-0.5,
            rope=rope_of(config, config.head_dim, kind if per_type else None),
            window=config.sliding_window if kind == "sliding_attention" else None,
            **overrides,
        )
        for kind in sorted(set(config.layer_types))
    }
    return decoder(
        config,
        [Layer(attn=attn_of[kind], ffn=mlp(config), post_norm=True) for kind in config.layer_types],
        norm_offset=1.0,
        embed_scale=config.hidden_size**0.5,
        logit_softcap=config.final_logit_softcapping,
    )
