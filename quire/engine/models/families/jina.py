"""Jina's embedders v2: BERT with ALiBi and gated feed-forward layers, in two variants."""

from __future__ import annotations

from typing import Any

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.layer_norm_decoders import alibi_slopes
from quire.engine.models.specs.decoder import (
    Embeddings,
    EncoderSpec,
    GatedMLP,
    GroupedQueryAttention,
    Layer,
    LayerNormSpec,
    QKNorm,
)

_ACTS = {"geglu": "gelu", "reglu": "relu"}
_QK_NORM = "jina-bert-v2-qk-post-norm"  # the repository whose code runs the second variant


def jina_bert(config: Any) -> EncoderSpec:
    """A config of model type bert whose positions are ALiBi.

    The variant for code and several languages normalizes queries and keys, and the attention's branch twice. Its config
    differs from the other one's only in the repository of its code.
    """
    kind = getattr(config, "feed_forward_type", "original")
    if kind not in _ACTS:
        raise UnsupportedModel(f"feed_forward_type {kind!r} is not supported; supported are {', '.join(_ACTS)}")
    heads, norm = config.num_attention_heads, LayerNormSpec(eps=config.layer_norm_eps)
    dim = config.hidden_size // heads
    has_qk_norm = _QK_NORM in str(getattr(config, "auto_map", None))
    attn = GroupedQueryAttention(
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        scale=dim**-0.5,
        rope=None,
        qkv_bias=True,
        out_bias=True,
        qk_norm=QKNorm.ALL if has_qk_norm else None,
        alibi=alibi_slopes(heads),
    )
    ffn = GatedMLP(size=config.intermediate_size, act=_ACTS[kind], down_bias=True)
    layer = Layer(attn=attn, ffn=ffn, pre_norm=False, post_ln=True, inner_post_ln=has_qk_norm)
    return EncoderSpec(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        layers=(layer,) * config.num_hidden_layers,
        norm=norm,
        max_positions=config.max_position_embeddings,
        embeddings=Embeddings(types=config.type_vocab_size, norm=norm),
        final_norm=False,
    )
