"""StarCoder 2."""

from __future__ import annotations

from typing import Any

from quire.engine.models.families.gpt2 import layer_norm_decoder
from quire.engine.models.families.llama import LLAMA_LAYER_NORMS, attention
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec, Layer, PlainMLP


def starcoder2(config: Any) -> DecoderSpec:
    """StarCoder 2: grouped heads, a rope, and a sliding window."""
    attn = attention(config, qkv_bias=config.use_bias, out_bias=config.use_bias, window=config.sliding_window)
    ffn = PlainMLP(size=config.intermediate_size, act=config.hidden_act, bias=config.use_bias)
    return layer_norm_decoder(config, [Layer(attn=attn, ffn=ffn)] * config.num_hidden_layers, config.norm_epsilon)


FAMILIES = (Family(name="starcoder2", config_types=("starcoder2",), spec=starcoder2, tensors=LLAMA_LAYER_NORMS),)
