"""Phi 1 to 2."""

from __future__ import annotations

from typing import Any

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.gpt2 import layer_norm_decoder, partial_rope
from quire.engine.models.families.llama import LLAMA_LAYER_NORMS, attention
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec, Layer, ParallelResidual, PlainMLP


def phi(config: Any) -> DecoderSpec:
    """Phi 1 to 2: partial RoPE, one norm for the parallel attention and feed-forward, biases in all layers."""
    if config.qk_layernorm:
        raise UnsupportedModel("Phi with qk_layernorm is not supported")
    attn = attention(config, rope=partial_rope(config), qkv_bias=True, out_bias=True)
    ffn = PlainMLP(size=config.intermediate_size, act=config.hidden_act)
    layer = Layer(attn=attn, ffn=ffn, parallel=ParallelResidual.ONE_NORM)
    return layer_norm_decoder(config, [layer] * config.num_hidden_layers, config.layer_norm_eps, head_bias=True)


FAMILIES = (Family(name="phi", config_types=("phi",), spec=phi, tensors=LLAMA_LAYER_NORMS),)
