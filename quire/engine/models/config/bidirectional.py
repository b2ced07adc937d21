"""Decoders whose config sets attention in both directions (EmbeddingGemma, GTE-Qwen2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.specs.decoder import Attention, DecoderSpec, EncoderSpec, GroupedQueryAttention, Layer


def is_not_causal(config: Any) -> bool:
    """Whether a config has `is_causal` false."""
    return getattr(config, "is_causal", True) is False


def as_encoder(spec: DecoderSpec, config: Any) -> EncoderSpec:
    """A decoder's layers with attention in both directions.

    With `is_causal` false a window is the largest distance of a key, as in encoders. Of Gemma 3's
    `use_bidirectional_attention` it is the first distance beyond.
    """
    widened = {layer.attn: _with_distance(layer.attn) for layer in spec.layers} if is_not_causal(config) else {}
    return EncoderSpec(
        hidden=spec.hidden,
        vocab=spec.vocab,
        layers=tuple(replace(layer, attn=widened.get(layer.attn, layer.attn)) for layer in spec.layers),
        norm=spec.norm,
        max_positions=fixed_positions(spec.layers, spec.max_positions),
        embeddings=spec.embeddings,
        final_norm=spec.final_norm,
    )


def fixed_positions(layers: Sequence[Layer], longest: int) -> int:
    """Positions up to which no rope depends on the length of the text, which encoders do not have by token."""
    ropes = [layer.attn.rope for layer in layers if layer.attn.rope is not None]
    return min([longest, *(rope.extension.trained_len for rope in ropes if rope.extension is not None)])


def _with_distance(attn: Attention) -> Attention:
    """The attention of a decoder in both directions, with a window of the largest distance."""
    if not isinstance(attn, GroupedQueryAttention):
        raise UnsupportedModel(f"{attn.description} in both directions (is_causal false) is not supported")
    if attn.sinks or attn.alibi is not None:
        kind = "attention sinks" if attn.sinks else "ALiBi"
        raise UnsupportedModel(f"{kind} in both directions (is_causal false) is not supported")
    return attn if attn.window is None else replace(attn, window=attn.window + 1)
