"""Command R."""

from __future__ import annotations

from typing import Any

from quire.engine.models.config.rope import rope_of
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.gpt2 import layer_norm_decoder
from quire.engine.models.families.llama import LLAMA_LAYER_NORMS, attention, mlp
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec, Layer, ParallelResidual


def cohere(config: Any) -> DecoderSpec:
    """Command R: an interleaved rope, both branches read one norm without bias, scaled logits."""
    if config.use_qk_norm:
        raise UnsupportedModel("Cohere with use_qk_norm is not supported")
    rope = rope_of(config, config.hidden_size // config.num_attention_heads, interleaved=True)
    attn = attention(config, rope=rope, qkv_bias=config.attention_bias, out_bias=config.attention_bias)
    layer = Layer(attn=attn, ffn=mlp(config), parallel=ParallelResidual.ONE_NORM)
    return layer_norm_decoder(
        config, [layer] * config.num_hidden_layers, config.layer_norm_eps, bias=False, logit_scale=config.logit_scale
    )


FAMILIES = (Family(name="cohere", config_types=("cohere",), spec=cohere, tensors=LLAMA_LAYER_NORMS),)
