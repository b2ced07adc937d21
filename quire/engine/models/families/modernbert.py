"""ModernBERT."""

from __future__ import annotations

from typing import Any

from quire.engine.models.config.rope import rope_of
from quire.engine.models.families.rope_bert import COLBERT, EMBEDDINGS, IGNORED, rope_attention, rope_encoder
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import Embeddings, EncoderSpec, GatedMLP, Layer, LayerNormSpec
from quire.engine.models.specs.pooler import Dense, HeadReaders, HeadStep, SparseHead
from quire.engine.models.specs.tensor_names import KIND, LAYER, WeightNames

_MODERNBERT = (
    *EMBEDDINGS,
    (LAYER + r"attn\.Wqkv" + KIND, "attn.qkv.{kind}"),
    (LAYER + r"attn\.Wo" + KIND, "attn.out.{kind}"),
    (LAYER + r"attn_norm" + KIND, "attn_norm.{kind}"),
    (LAYER + r"mlp_norm" + KIND, "ffn_norm.{kind}"),
    (LAYER + r"mlp\.Wi" + KIND, "ffn.gate_up.{kind}"),
    (LAYER + r"mlp\.Wo" + KIND, "ffn.down.{kind}"),
    (r"final_norm" + KIND, "norm.{kind}"),
    (r"head\.dense" + KIND, "heads.classify.0.{kind}"),
    (r"head\.norm" + KIND, "heads.classify.1.{kind}"),
    (r"classifier" + KIND, "heads.classify.2.{kind}"),
    (r"head\.dense" + KIND, "heads.sparse_head.dense.{kind}"),
    (r"head\.norm" + KIND, "heads.sparse_head.norm.{kind}"),
    (r"decoder\.weight", "heads.sparse_head.table"),
    (r"decoder\.bias", "heads.sparse_head.bias"),
    *COLBERT,
)


def modernbert(config: Any) -> EncoderSpec:
    """ModernBERT: local and global layers with different RoPE parameters, norms before the branches."""
    norm = LayerNormSpec(eps=config.norm_eps, bias=config.norm_bias)
    dim = config.hidden_size // config.num_attention_heads
    attns = {
        kind: rope_attention(
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
    return rope_encoder(config, layers, norm, Embeddings(norm=norm), final_norm=True)


def _head(config: Any) -> tuple[HeadStep, ...]:
    """ModernBERT's dense layer and norm."""
    size = config.hidden_size
    dense = Dense(size_in=0, size_out=size, act=config.classifier_activation, bias=config.classifier_bias)
    return (dense, LayerNormSpec(eps=config.norm_eps, bias=config.norm_bias))


def _masked_lm(config: Any) -> SparseHead:
    dense = Dense(size_in=0, size_out=config.hidden_size, act=config.classifier_activation, bias=config.classifier_bias)
    norm = LayerNormSpec(eps=config.norm_eps, bias=config.norm_bias)
    return SparseHead(dense=dense, norm=norm, bias=config.decoder_bias)


FAMILIES = (
    Family(
        name="modernbert",
        config_types=("modernbert",),
        kind="encoder",
        spec=modernbert,
        tensors=WeightNames(_MODERNBERT, ignored=IGNORED),
        heads=HeadReaders(labels=_head, token_labels=_head, masked_lm=_masked_lm),
    ),
)
