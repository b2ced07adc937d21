"""BERT, and encoders that differ from it in a few options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.models.errors import UnsupportedModel, UnsupportedOption
from quire.engine.models.families.jina import jina_bert
from quire.engine.models.specs.decoder import (
    DisentangledAttention,
    Embeddings,
    EncoderSpec,
    GroupedQueryAttention,
    Layer,
    LayerNormSpec,
    PlainMLP,
    RelativeBias,
)
from quire.engine.models.specs.pooler import Dense, HeadStep

_MPNET_BUCKETS = 32


def bert(config: Any) -> EncoderSpec:
    """BERT: learned positions, norms after the sums. With ALiBi it is Jina's."""
    kind = getattr(config, "position_embedding_type", "absolute")
    if kind == "alibi":
        return jina_bert(config)
    if kind not in (None, "absolute"):
        raise UnsupportedModel(f"position_embedding_type {kind!r} is not supported; supported are absolute and alibi")
    return _encoder(config, _attention(config))


def ernie(config: Any) -> EncoderSpec:
    """ERNIE: BERT, and an embedding of the task, which is always the first one."""
    tasks = config.task_type_vocab_size if config.use_task_id else 0
    return _encoder(config, _attention(config), tasks=tasks)


def albert(config: Any) -> EncoderSpec:
    """ALBERT: BERT whose layers share their weights in groups, with smaller embeddings."""
    if config.inner_group_num != 1:
        raise UnsupportedOption("ALBERT with an inner_group_num other than 1 is not supported")
    layers, groups = config.num_hidden_layers, config.num_hidden_groups
    spec = _encoder(config, _attention(config), size=config.embedding_size)
    order = tuple(int(index / (layers / groups)) for index in range(layers))
    return replace(spec, layers=spec.layers[:1] * groups, order=order)


def xlm_roberta_xl(config: Any) -> EncoderSpec:
    """XLM-RoBERTa XL: RoBERTa with norms before the branches, and one after the last layer."""
    spec = roberta(config)
    layers = tuple(replace(layer, pre_norm=True, post_ln=False) for layer in spec.layers)
    return replace(spec, layers=layers, embeddings=replace(spec.embeddings, norm=None), final_norm=True)


def roberta(config: Any) -> EncoderSpec:
    """RoBERTa, XLM-RoBERTa, CamemBERT: BERT whose positions begin after the row of the padding token."""
    if config.pad_token_id is None:
        raise UnsupportedModel("the model's config.json has no pad_token_id, after which positions begin")
    return _encoder(config, _attention(config), position_offset=config.pad_token_id + 1)


def mpnet(config: Any) -> EncoderSpec:
    """MPNet: RoBERTa's positions and a relative bias, no token types."""
    if config.relative_attention_num_buckets != _MPNET_BUCKETS:  # transformers always uses 32
        raise UnsupportedModel(f"relative_attention_num_buckets must be {_MPNET_BUCKETS}")
    bias = RelativeBias(buckets=_MPNET_BUCKETS, max_distance=128)
    attn = _attention(config, relative_bias=bias)
    return _encoder(config, attn, position_offset=2, types=0)


def electra(config: Any) -> EncoderSpec:
    """ELECTRA: BERT with another size of embeddings than of hidden states."""
    size = config.embedding_size
    return _encoder(config, _attention(config), size=size if size != config.hidden_size else None)


def distilbert(config: Any) -> EncoderSpec:
    """DistilBERT: BERT without token types."""
    norm = LayerNormSpec(eps=1e-12)
    heads, dim = config.n_heads, config.dim // config.n_heads
    attn = GroupedQueryAttention(
        heads=heads, kv_heads=heads, head_dim=dim, scale=dim**-0.5, rope=None, qkv_bias=True, out_bias=True
    )
    layer = Layer(attn=attn, ffn=PlainMLP(size=config.hidden_dim, act=config.activation), pre_norm=False, post_ln=True)
    return EncoderSpec(
        hidden=config.dim,
        vocab=config.vocab_size,
        layers=(layer,) * config.n_layers,
        norm=norm,
        max_positions=config.max_position_embeddings,
        embeddings=Embeddings(positions=config.max_position_embeddings, norm=norm),
        final_norm=False,
    )


def deberta_v2(config: Any) -> EncoderSpec:
    """DeBERTa v2 and v3: disentangled attention."""
    if getattr(config, "conv_kernel_size", 0):
        raise UnsupportedOption("DeBERTa with a convolution (conv_kernel_size) is not supported")
    if not config.relative_attention:
        raise UnsupportedOption("DeBERTa without relative_attention is not supported")
    kinds = set(config.pos_att_type or ())
    attn = DisentangledAttention(
        heads=config.num_attention_heads,
        head_dim=getattr(config, "attention_head_size", None) or config.hidden_size // config.num_attention_heads,
        buckets=max(0, config.position_buckets),
        max_distance=config.max_relative_positions if config.max_relative_positions > 0 else _positions(config),
        share_keys=bool(getattr(config, "share_att_key", False)),
        to_position="c2p" in kinds,
        from_position="p2c" in kinds,
        norm_positions="layer_norm" in str(config.norm_rel_ebd),
    )
    positions = _positions(config) if config.position_biased_input else 0
    size = getattr(config, "embedding_size", None) or config.hidden_size
    own_size = size if size != config.hidden_size else None
    return _encoder(config, attn, positions=positions, size=own_size, norm_projected=own_size is not None)


def bert_head(config: Any) -> tuple[HeadStep, ...]:
    """The pooler of BERT, without the labels."""
    return (Dense(size_in=0, size_out=config.hidden_size, act="tanh"),)


def electra_head(config: Any) -> tuple[HeadStep, ...]:
    """ELECTRA's dense layer."""
    return (Dense(size_in=0, size_out=config.hidden_size, act="gelu"),)


def distilbert_head(config: Any) -> tuple[HeadStep, ...]:
    """DistilBERT's dense layer."""
    return (Dense(size_in=0, size_out=config.dim, act="relu"),)


def deberta_head(config: Any) -> tuple[HeadStep, ...]:
    """The pooler of DeBERTa."""
    return (Dense(size_in=0, size_out=config.pooler_hidden_size, act=config.pooler_hidden_act),)


def _attention(config: Any, **overrides: Any) -> GroupedQueryAttention:
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    return GroupedQueryAttention(
        heads=heads, kv_heads=heads, head_dim=dim, scale=dim**-0.5, rope=None, qkv_bias=True, out_bias=True, **overrides
    )


def _positions(config: Any) -> int:
    positions: int = config.max_position_embeddings
    return positions


def _encoder(
    config: Any,
    attn: GroupedQueryAttention | DisentangledAttention,
    *,
    positions: int | None = None,
    position_offset: int = 0,
    types: int | None = None,
    size: int | None = None,
    norm_projected: bool = False,
    tasks: int = 0,
) -> EncoderSpec:
    norm = LayerNormSpec(eps=config.layer_norm_eps)
    ffn = PlainMLP(size=config.intermediate_size, act=config.hidden_act)
    rows = _positions(config) if positions is None else positions
    return EncoderSpec(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        layers=(Layer(attn=attn, ffn=ffn, pre_norm=False, post_ln=True),) * config.num_hidden_layers,
        norm=norm,
        max_positions=_positions(config) - position_offset,
        embeddings=Embeddings(
            positions=rows,
            position_offset=position_offset,
            types=config.type_vocab_size if types is None else types,
            norm=norm,
            size=size,
            norm_projected=norm_projected,
            tasks=tasks,
        ),
        final_norm=False,
    )
