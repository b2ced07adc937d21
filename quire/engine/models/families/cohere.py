"""Command R, and Command A with windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.engine.models.config.rope import rope_of
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.gpt2 import layer_norm_decoder
from quire.engine.models.families.llama import LLAMA_LAYER_NORMS, attention, mlp, windowed
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec, GroupedQueryAttention, Layer, ParallelResidual


def cohere(config: Any) -> DecoderSpec:
    """Command R: an interleaved rope, both branches read one norm without bias, scaled logits."""
    if config.use_qk_norm:
        raise UnsupportedModel("Cohere with use_qk_norm is not supported")
    return _decoder(config, [_attention(config)] * config.num_hidden_layers)


def cohere2(config: Any) -> DecoderSpec:
    """Command R7B and Command A: layers with windows have a rope, the others have no positions."""
    attn = _attention(config)
    return _decoder(
        config,
        [layer if layer.window is not None else replace(layer, rope=None) for layer in windowed(config, attn)],
    )


def _attention(config: Any) -> GroupedQueryAttention:
    rope = rope_of(config, config.hidden_size // config.num_attention_heads, interleaved=True)
    return attention(config, rope=rope, qkv_bias=config.attention_bias, out_bias=config.attention_bias)


def _decoder(config: Any, layers: Sequence[GroupedQueryAttention]) -> DecoderSpec:
    return layer_norm_decoder(
        config,
        [Layer(attn=attn, ffn=mlp(config), parallel=ParallelResidual.ONE_NORM) for attn in layers],
        config.layer_norm_eps,
        bias=False,
        logit_scale=config.logit_scale,
    )


FAMILIES = (
    Family(name="cohere", config_types=("cohere",), spec=cohere, tensors=LLAMA_LAYER_NORMS),
    Family(name="cohere2", config_types=("cohere2",), spec=cohere2, tensors=LLAMA_LAYER_NORMS),
)
