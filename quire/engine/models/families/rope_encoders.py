"""Encoders with RoPE, such as ModernBERT, Nomic Embed and GTE; decoders that attend in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.llama import llama
from quire.engine.models.families.rope import max_positions, rope_of
from quire.engine.models.specs.decoder import (
    Attention,
    DecoderSpec,
    Embeddings,
    EncoderSpec,
    GatedMLP,
    GroupedQueryAttention,
    Layer,
    LayerNormSpec,
    PlainMLP,
)
from quire.engine.models.specs.pooler import Dense, HeadStep
from quire.engine.models.specs.rope import Rope


def modernbert(config: Any) -> EncoderSpec:
    """ModernBERT: local and global layers with different RoPE parameters, norms before the branches."""
    norm = LayerNormSpec(eps=config.norm_eps, bias=config.norm_bias)
    dim = config.hidden_size // config.num_attention_heads
    attns = {
        kind: _attention(
            config,
            rope_of(config, dim, kind),
            bias=config.attention_bias,
            window=config.sliding_window + 1 if kind == "sliding_attention" else None,
        )
        for kind in set(config.layer_types)
    }
    ffn = GatedMLP(size=config.intermediate_size, act=config.hidden_activation, bias=config.mlp_bias)
    layers = [
        Layer(attn=attns[kind], ffn=ffn, pre_attn_norm=index > 0) for index, kind in enumerate(config.layer_types)
    ]
    return _encoder(config, layers, norm, Embeddings(norm=norm), final_norm=True)


def nomic_bert(config: Any) -> EncoderSpec:
    """Nomic Embed: BERT with a rope and gated feed-forward layers, without biases."""
    norm = LayerNormSpec(eps=config.layer_norm_eps)
    attn = _attention(config, _rope(config), bias=False)
    layer = Layer(
        attn=attn, ffn=GatedMLP(size=config.intermediate_size, act=config.hidden_act), pre_norm=False, post_ln=True
    )
    embeddings = Embeddings(types=config.type_vocab_size, norm=norm)
    return _encoder(config, [layer] * config.num_hidden_layers, norm, embeddings, final_norm=False)


def gte(config: Any) -> EncoderSpec:
    """GTE v1.5 and multilingual: BERT with a rope and gated feed-forward layers."""
    norm = LayerNormSpec(eps=config.layer_norm_eps)
    attn = _attention(config, _rope(config), bias=True)
    ffn = GatedMLP(size=config.intermediate_size, act=config.hidden_act, down_bias=True)
    embeddings = Embeddings(types=config.type_vocab_size, norm=norm)
    layers = [Layer(attn=attn, ffn=ffn, pre_norm=False, post_ln=True)] * config.num_hidden_layers
    return _encoder(config, layers, norm, embeddings, final_norm=False)


def eurobert(config: Any) -> EncoderSpec:
    """EuroBERT: Llama with attention in both directions."""
    return as_encoder(llama(config), config)


def jina_embeddings_v3(config: Any) -> EncoderSpec:
    """Jina's embedder v3: XLM-RoBERTa with a rope in place of learned positions."""
    norm = LayerNormSpec(eps=config.layer_norm_eps)
    attn = _attention(config, _rope(config), bias=True)
    ffn = PlainMLP(size=config.intermediate_size, act=config.hidden_act)
    layers = [Layer(attn=attn, ffn=ffn, pre_norm=False, post_ln=True)] * config.num_hidden_layers
    return _encoder(config, layers, norm, Embeddings(types=config.type_vocab_size, norm=norm), final_norm=False)


def eurobert_head(config: Any) -> tuple[HeadStep, ...]:
    """EuroBERT's dense layer."""
    return (Dense(size_in=0, size_out=config.hidden_size, act="gelu"),)


def modernbert_head(config: Any) -> tuple[HeadStep, ...]:
    """ModernBERT's dense layer and norm."""
    size = config.hidden_size
    dense = Dense(size_in=0, size_out=size, act=config.classifier_activation, bias=config.classifier_bias)
    return (dense, LayerNormSpec(eps=config.norm_eps, bias=config.norm_bias))


def is_bidirectional(config: Any) -> bool:
    """Whether the config of a decoder sets bidirectional attention.

    Raises:
        UnsupportedModel: transformers' masks stay causal then, or do with some of its attention kernels.
    """
    kind, flag = config.model_type, bool(getattr(config, "use_bidirectional_attention", False))
    if flag and kind == "gemma2":
        raise UnsupportedModel(
            "use_bidirectional_attention is not supported in models of type 'gemma2', whose masks stay causal; "
            "is_causal false makes attention bidirectional"
        )
    if kind == "gpt_neo" and not _is_causal(config):
        raise UnsupportedModel("is_causal false is not supported in models of type 'gpt_neo', whose masks stay causal")
    return not _is_causal(config) or (flag and kind == "gemma3_text")


def as_encoder(spec: DecoderSpec, config: Any) -> EncoderSpec:
    """A decoder's layers with attention in both directions (EmbeddingGemma, GTE-Qwen2).

    With `is_causal` false a window is the largest distance of a key, as in encoders. Of Gemma 3's
    `use_bidirectional_attention` it is the first distance beyond.
    """
    widened = {} if _is_causal(config) else {layer.attn: _with_distance(layer.attn) for layer in spec.layers}
    return EncoderSpec(
        hidden=spec.hidden,
        vocab=spec.vocab,
        layers=tuple(replace(layer, attn=widened.get(layer.attn, layer.attn)) for layer in spec.layers),
        norm=spec.norm,
        max_positions=_fixed_positions(spec.layers, spec.max_positions),
        embeddings=spec.embeddings,
        final_norm=spec.final_norm,
    )


def _is_causal(config: Any) -> bool:
    return getattr(config, "is_causal", True) is not False


def _with_distance(attn: Attention) -> Attention:
    """The attention of a decoder in both directions, with a window of the largest distance."""
    if not isinstance(attn, GroupedQueryAttention):
        raise UnsupportedModel("latent attention in both directions (is_causal false) is not supported")
    if attn.sinks or attn.alibi is not None:
        kind = "attention sinks" if attn.sinks else "ALiBi"
        raise UnsupportedModel(f"{kind} in both directions (is_causal false) is not supported")
    return attn if attn.window is None else replace(attn, window=attn.window + 1)


def _fixed_positions(layers: Sequence[Layer], longest: int) -> int:
    """Positions up to which no rope depends on the length of the text, which encoders do not have by token."""
    ropes = [layer.attn.rope for layer in layers if layer.attn.rope is not None]
    return min([longest, *(rope.extension.trained_len for rope in ropes if rope.extension is not None)])


def _attention(config: Any, rope: Rope, *, bias: bool, window: int | None = None) -> GroupedQueryAttention:
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return GroupedQueryAttention(
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        scale=dim**-0.5,
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
        window=window,
    )


def _rope(config: Any) -> Rope:
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return rope_of(config, dim)


def _encoder(
    config: Any, layers: list[Layer], norm: LayerNormSpec, embeddings: Embeddings, *, final_norm: bool
) -> EncoderSpec:
    if not layers:
        raise UnsupportedModel("the model's config.json describes a model without layers")
    per_type = "full_attention" in (getattr(config, "rope_parameters", None) or {})
    return EncoderSpec(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        layers=tuple(layers),
        norm=norm,
        max_positions=_fixed_positions(layers, config.max_position_embeddings if per_type else max_positions(config)),
        embeddings=embeddings,
        final_norm=final_norm,
    )
