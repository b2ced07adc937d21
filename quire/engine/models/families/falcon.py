"""Falcon and BLOOM."""

from __future__ import annotations

from typing import Any

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.gpt2 import BLOCK, HEADS, layer_norm_decoder, plain_attention
from quire.engine.models.families.gpt_neox import fused_heads
from quire.engine.models.families.llama import attention
from quire.engine.models.family import Facts, Family
from quire.engine.models.specs.decoder import (
    DecoderSpec,
    Embeddings,
    Layer,
    LayerNormSpec,
    ParallelResidual,
    PlainMLP,
)
from quire.engine.models.specs.tensor_names import KIND, WeightNames

_ALIBI_LENGTH = 2048

_FALCON = (
    (r"word_embeddings\.weight", "embed.weight"),
    (r"word_embeddings_layernorm" + KIND, "embed_sum.norm.{kind}"),  # BLOOM
    (BLOCK + r"self_attention\.query_key_value" + KIND, "attn.qkv.{kind}"),
    (BLOCK + r"self_attention\.dense" + KIND, "attn.out.{kind}"),
    (BLOCK + r"mlp\.dense_h_to_4h" + KIND, "ffn.up.{kind}"),
    (BLOCK + r"mlp\.dense_4h_to_h" + KIND, "ffn.down.{kind}"),
    (BLOCK + r"(?:input_layernorm|ln_attn)" + KIND, "attn_norm.{kind}"),
    (BLOCK + r"(?:post_attention_layernorm|ln_mlp)" + KIND, "ffn_norm.{kind}"),
    (r"ln_f" + KIND, "norm.{kind}"),
    *HEADS,
)


def falcon(config: Any) -> DecoderSpec:
    """Falcon: one key and value head, or groups of them; both branches read one norm, or one each."""
    if config.alibi:
        raise UnsupportedModel("Falcon with ALiBi is not supported")
    is_new = config.new_decoder_architecture
    kv_heads = config.num_kv_heads if is_new else 1 if config.multi_query else config.num_attention_heads
    dim = config.hidden_size // config.num_attention_heads
    attn = attention(config, head_dim=dim, kv_heads=kv_heads, qkv_bias=config.bias, out_bias=config.bias)
    two_norms = is_new and config.num_ln_in_parallel_attn in (None, 2)
    if config.parallel_attn and not is_new and config.num_ln_in_parallel_attn == 2:
        raise UnsupportedModel("Falcon with two norms in the old architecture is not supported")
    parallel = ParallelResidual.TWO_NORMS if two_norms else ParallelResidual.ONE_NORM if config.parallel_attn else None
    layer = Layer(
        attn=attn, ffn=PlainMLP(size=config.ffn_hidden_size, act=config.activation, bias=config.bias), parallel=parallel
    )
    return layer_norm_decoder(config, [layer] * config.num_hidden_layers, config.layer_norm_epsilon)


def bloom(config: Any) -> DecoderSpec:
    """BLOOM: ALiBi, a norm of the embeddings."""
    if config.apply_residual_connection_post_layernorm:
        raise UnsupportedModel("BLOOM with apply_residual_connection_post_layernorm is not supported")
    heads = config.n_head
    attn = plain_attention(heads, config.hidden_size // heads, alibi=alibi_slopes(heads))
    layer = Layer(attn=attn, ffn=PlainMLP(size=4 * config.hidden_size, act="gelu_pytorch_tanh"))
    eps = config.layer_norm_epsilon
    embeddings = Embeddings(norm=LayerNormSpec(eps=eps))
    length = getattr(config, "seq_length", None) or _ALIBI_LENGTH  # of the training; ALiBi itself has no limit
    return layer_norm_decoder(config, [layer] * config.n_layer, eps, embeddings=embeddings, positions=length)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """A geometric series; for numbers that are no power of two, filled up with every second of the next one's."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    return tuple(slopes + [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (heads - power), 2)])


def _names(spec: DecoderSpec, _facts: Facts) -> WeightNames:
    return WeightNames(_FALCON, r"transformer\.", r"lm_head\.weight|.*inv_freq", convert=fused_heads(spec))


FAMILIES = (
    Family(name="bloom", config_types=("bloom",), spec=bloom, tensors=_names),
    Family(name="falcon", config_types=("falcon",), spec=falcon, tensors=_names),
)
