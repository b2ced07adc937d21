"""OPT."""

from __future__ import annotations

from typing import Any

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.gpt2 import HEADS, layer_norm_decoder, plain_attention
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec, Embeddings, Layer, PlainMLP
from quire.engine.models.specs.tensor_names import KIND, LAYER, WeightNames

_OPT = (
    (r"embed_tokens\.weight", "embed.weight"),
    (r"embed_positions\.weight", "embed_sum.positions"),
    (LAYER + r"self_attn\.(?P<part>q|k|v)_proj" + KIND, "attn.qkv.{kind}"),
    (LAYER + r"self_attn\.out_proj" + KIND, "attn.out.{kind}"),
    (LAYER + r"self_attn_layer_norm" + KIND, "attn_norm.{kind}"),
    (LAYER + r"fc1" + KIND, "ffn.up.{kind}"),
    (LAYER + r"fc2" + KIND, "ffn.down.{kind}"),
    (LAYER + r"final_layer_norm" + KIND, "ffn_norm.{kind}"),
    (r"final_layer_norm" + KIND, "norm.{kind}"),
    *HEADS,
)
_NAMES = WeightNames(_OPT, r"(?:model\.)?decoder\.", r"lm_head\.weight")


def opt(config: Any) -> DecoderSpec:
    """OPT: learned positions from row 2 on."""
    if not config.do_layer_norm_before or config._remove_final_layer_norm:
        raise UnsupportedModel("OPT with post-LN layers (do_layer_norm_before false) is not supported")
    if config.word_embed_proj_dim != config.hidden_size:
        raise UnsupportedModel("OPT with a word_embed_proj_dim other than the hidden_size is not supported")
    if not config.layer_norm_elementwise_affine:
        raise UnsupportedModel("OPT with non-affine norms (layer_norm_elementwise_affine false) is not supported")
    dim = config.hidden_size // config.num_attention_heads
    attn = plain_attention(config.num_attention_heads, dim, qkv_bias=config.enable_bias, out_bias=config.enable_bias)
    ffn = PlainMLP(size=config.ffn_dim, act=config.activation_function, bias=config.enable_bias)
    embeddings = Embeddings(positions=config.max_position_embeddings + 2, position_offset=2)
    return layer_norm_decoder(
        config, [Layer(attn=attn, ffn=ffn)] * config.num_hidden_layers, 1e-5, embeddings=embeddings
    )


FAMILIES = (Family(name="opt", config_types=("opt",), spec=opt, tensors=_NAMES),)
