"""BERT, and encoders that differ from it in a few options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quire.engine.models.errors import UnsupportedModel, UnsupportedOption
from quire.engine.models.families.falcon import alibi_slopes
from quire.engine.models.family import Facts, Family
from quire.engine.models.specs.decoder import (
    DisentangledAttention,
    Embeddings,
    EncoderSpec,
    GatedMLP,
    GroupedQueryAttention,
    Layer,
    LayerNormSpec,
    PlainMLP,
    QKNorm,
    RelativeBias,
)
from quire.engine.models.specs.pooler import Dense, HeadReaders, HeadStep, SparseHead
from quire.engine.models.specs.tensor_names import KIND, LAYER, WeightNames, swap_halves

_MPNET_BUCKETS = 32
_JINA_ACTS = {"geglu": "gelu", "reglu": "relu"}
_JINA_QK_NORM = "jina-bert-v2-qk-post-norm"  # the repository whose code runs the second variant
_LAYER = LAYER.replace("layers", "encoder\\.layer")
_PREFIXES = (
    r"(?:model|bert|roberta|electra|distilbert|mpnet|deberta|xlm_roberta|camembert|albert|ernie|data2vec_text|xlm_roberta_xl)"
    r"\."
)
_EMBEDDINGS = (
    (r"embeddings\.word_embeddings\.weight", "embed.weight"),
    (r"embeddings\.position_embeddings\.weight", "embed_sum.positions"),
    (r"embeddings\.token_type_embeddings\.weight", "embed_sum.types"),
    (r"embeddings\.task_type_embeddings\.weight", "embed_sum.tasks"),
    (r"embeddings\.LayerNorm" + KIND, "embed_sum.norm.{kind}"),
    (r"encoder\.embedding_hidden_mapping_in" + KIND, "embed_sum.project.{kind}"),
    (r"embeddings_project" + KIND, "embed_sum.project.{kind}"),
    (r"embeddings\.embed_proj" + KIND, "embed_sum.project.{kind}"),
)
_LAYERS = (
    (_LAYER + r"attention\.self\.(?P<part>query|key|value)(?:_proj)?" + KIND, "attn.qkv.{kind}"),
    (_LAYER + r"attention\.self\.pos_(?P<side>q)uery_proj" + KIND, "attn.pos_{side}.{kind}"),
    (_LAYER + r"attention\.self\.pos_(?P<side>k)ey_proj" + KIND, "attn.pos_{side}.{kind}"),
    (_LAYER + r"attention\.output\.dense" + KIND, "attn.out.{kind}"),
    (_LAYER + r"attention\.output\.LayerNorm" + KIND, "attn_inner_post_ln.{kind}"),  # Jina, with layer_norm_1
    (_LAYER + r"attention\.output\.LayerNorm" + KIND, "attn_post_ln.{kind}"),
    (_LAYER + r"attention\.self\.layer_norm_(?P<side>q|k)" + KIND, "attn.{side}_norm.{kind}"),
    (_LAYER + r"layer_norm_1" + KIND, "attn_post_ln.{kind}"),
    (_LAYER + r"layer_norm_2" + KIND, "ffn_post_ln.{kind}"),
    (_LAYER + r"mlp\.layernorm" + KIND, "ffn_post_ln.{kind}"),
    (_LAYER + r"mlp\.gated_layers" + KIND, "ffn.gate_up.{kind}"),
    (_LAYER + r"mlp\.up_gated_layer" + KIND, "ffn.gate_up.{kind}"),
    (_LAYER + r"mlp\.(?:wo|down_layer)" + KIND, "ffn.down.{kind}"),
    (_LAYER + r"attention\.attn\.(?P<part>q|k|v)" + KIND, "attn.qkv.{kind}"),  # MPNet
    (_LAYER + r"attention\.attn\.o" + KIND, "attn.out.{kind}"),
    (_LAYER + r"attention\.LayerNorm" + KIND, "attn_post_ln.{kind}"),
    (_LAYER + r"intermediate\.dense" + KIND, "ffn.up.{kind}"),
    (_LAYER + r"output\.dense" + KIND, "ffn.down.{kind}"),
    (_LAYER + r"output\.LayerNorm" + KIND, "ffn_post_ln.{kind}"),
    (_LAYER + r"attention\.self_attn_layer_norm" + KIND, "attn_norm.{kind}"),  # XLM-RoBERTa XL
    (_LAYER + r"LayerNorm" + KIND, "ffn_norm.{kind}"),
    (r"encoder\.LayerNorm" + KIND, "norm.{kind}"),
    (r"encoder\.relative_attention_bias\.weight", "relative_bias.weight"),
    (r"encoder\.rel_embeddings\.weight", "relative_positions.weight"),
    (r"encoder\.LayerNorm" + KIND, "relative_positions.norm.{kind}"),
)
_ALBERT_LAYER = LAYER.replace("layers", r"encoder\.albert_layer_groups") + r"albert_layers\.0\."
_ALBERT = (
    (_ALBERT_LAYER + r"attention\.(?P<part>query|key|value)" + KIND, "attn.qkv.{kind}"),
    (_ALBERT_LAYER + r"attention\.dense" + KIND, "attn.out.{kind}"),
    (_ALBERT_LAYER + r"attention\.LayerNorm" + KIND, "attn_post_ln.{kind}"),
    (_ALBERT_LAYER + r"ffn" + KIND, "ffn.up.{kind}"),
    (_ALBERT_LAYER + r"ffn_output" + KIND, "ffn.down.{kind}"),
    (_ALBERT_LAYER + r"full_layer_layer_norm" + KIND, "ffn_post_ln.{kind}"),
)
# A head is one linear layer after the pooler's layer, or two linear layers.
_HEAD_NAMES = (
    (r"linear\.weight", "heads.token_embed.0.weight"),  # ColBERT
    (r"pooler(?:\.dense)?" + KIND, "heads.classify.0.{kind}"),
    (r"classifier\.dense" + KIND, "heads.classify.0.{kind}"),
    (r"pre_classifier" + KIND, "heads.classify.0.{kind}"),
    (r"classifier\.out_proj" + KIND, "heads.classify.1.{kind}"),
    (r"classifier" + KIND, "heads.classify.{last}.{kind}"),
)
# Where a checkpoint has a parameter under two names, the first rule is that of the name which transformers reads.
MASKED_LM = (
    (r"(?:cls\.)?predictions\.decoder\.weight", "heads.sparse_head.table"),
    (r"lm_head\.decoder\.weight", "heads.sparse_head.table"),
    (r"(?:vocab_projector|generator_lm_head|lm_head)\.weight", "heads.sparse_head.table"),
    (r"(?:cls\.)?predictions\.decoder\.bias", "heads.sparse_head.bias"),
    (r"lm_head\.decoder\.bias", "heads.sparse_head.bias"),
    (r"(?:vocab_projector|generator_lm_head|lm_head)\.bias", "heads.sparse_head.bias"),
    (r"(?:cls\.)?predictions\.bias", "heads.sparse_head.bias"),
    (r"lm_predictions\.lm_head\.bias", "heads.sparse_head.bias"),
    (r"(?:cls\.)?predictions\.(?:transform\.)?dense" + KIND, "heads.sparse_head.dense.{kind}"),
    (r"lm_head\.dense" + KIND, "heads.sparse_head.dense.{kind}"),
    (r"(?:vocab_transform|generator_predictions\.dense)" + KIND, "heads.sparse_head.dense.{kind}"),
    (r"lm_predictions\.lm_head\.dense" + KIND, "heads.sparse_head.dense.{kind}"),
    (r"(?:cls\.)?predictions\.(?:transform\.)?(?:LayerNorm|layer_norm)" + KIND, "heads.sparse_head.norm.{kind}"),
    (r"lm_head\.(?:layer_norm|norm)" + KIND, "heads.sparse_head.norm.{kind}"),
    (r"(?:vocab_layer_norm|generator_predictions\.LayerNorm)" + KIND, "heads.sparse_head.norm.{kind}"),
    (r"lm_predictions\.lm_head\.LayerNorm" + KIND, "heads.sparse_head.norm.{kind}"),
)
_IGNORED = (
    r"embeddings\.(position_ids|token_type_ids)|pooler\.(dense\.)?\w+|cls\..*|lm_head\..*|vocab_\w+\..*|predictions\..*|"
    r"(discriminator|generator)_\w+\..*|mask_predictions\..*|lm_predictions\..*|sop_classifier\..*"
)
_DISTILBERT_LAYER = LAYER.replace("layers", "transformer\\.layer")
_DISTILBERT = (
    (_DISTILBERT_LAYER + r"attention\.(?P<part>q|k|v)_lin" + KIND, "attn.qkv.{kind}"),
    (_DISTILBERT_LAYER + r"attention\.out_lin" + KIND, "attn.out.{kind}"),
    (_DISTILBERT_LAYER + r"sa_layer_norm" + KIND, "attn_post_ln.{kind}"),
    (_DISTILBERT_LAYER + r"ffn\.lin1" + KIND, "ffn.up.{kind}"),
    (_DISTILBERT_LAYER + r"ffn\.lin2" + KIND, "ffn.down.{kind}"),
    (_DISTILBERT_LAYER + r"output_layer_norm" + KIND, "ffn_post_ln.{kind}"),
)


def bert(config: Any) -> EncoderSpec:
    """BERT: learned positions, norms after the sums. With ALiBi it is Jina's."""
    kind = getattr(config, "position_embedding_type", "absolute")
    if kind == "alibi":
        return _jina_bert(config)
    if kind not in (None, "absolute"):
        raise UnsupportedModel(f"position_embedding_type {kind!r} is not supported; supported are absolute and alibi")
    return _encoder(config, _attention(config))


def _jina_bert(config: Any) -> EncoderSpec:
    """Jina's embedders v2: BERT with ALiBi and gated feed-forward layers, in two variants.

    The variant for code and several languages normalizes queries and keys, and the attention's branch twice. Its config
    differs from the other one's only in the repository of its code.
    """
    kind = getattr(config, "feed_forward_type", "original")
    if kind not in _JINA_ACTS:
        raise UnsupportedModel(f"feed_forward_type {kind!r} is not supported; supported are {', '.join(_JINA_ACTS)}")
    heads, norm = config.num_attention_heads, LayerNormSpec(eps=config.layer_norm_eps)
    dim = config.hidden_size // heads
    has_qk_norm = _JINA_QK_NORM in str(getattr(config, "auto_map", None))
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
    ffn = GatedMLP(size=config.intermediate_size, act=_JINA_ACTS[kind], down_bias=True)
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


def _names(spec: EncoderSpec, facts: Facts) -> WeightNames:
    # Gated feed-forward layers of Jina's code embedder have the ups before the gates.
    convert = {"ffn.gate_up.weight": swap_halves} if any(layer.inner_post_ln for layer in spec.layers) else {}
    heads = with_last_step(_HEAD_NAMES, facts)
    rules = (*_EMBEDDINGS, *_LAYERS, *_DISTILBERT, *_ALBERT, *heads, *MASKED_LM)
    return WeightNames(rules, prefixes=_PREFIXES, ignored=_IGNORED, gamma_beta=True, convert=convert)


def with_last_step(rules: tuple[tuple[str, str], ...], facts: Facts) -> tuple[tuple[str, str], ...]:
    """The rules, with the index of the classification head's last step for "{last}"."""
    last = 0 if facts.pooler is None else max(0, len(facts.pooler.classify) - 1)
    return tuple((pattern, target.replace("{last}", str(last))) for pattern, target in rules)


def masked_lm_head(size: int, act: str, eps: float) -> SparseHead:
    """A dense layer, a norm and an output projection with a bias."""
    return SparseHead(dense=Dense(size_in=0, size_out=size, act=act), norm=LayerNormSpec(eps=eps), bias=True)


def bert_masked_lm(config: Any) -> SparseHead:
    """BERT's head."""
    return masked_lm_head(config.hidden_size, config.hidden_act, config.layer_norm_eps)


def roberta_masked_lm(config: Any) -> SparseHead:
    """The head of RoBERTa's relatives, which does not read `hidden_act` in transformers."""
    return masked_lm_head(config.hidden_size, "gelu", config.layer_norm_eps)


def _distilbert_masked_lm(config: Any) -> SparseHead:
    return masked_lm_head(config.dim, config.activation, 1e-12)


def _electra_masked_lm(config: Any) -> SparseHead:
    return masked_lm_head(config.embedding_size, "gelu", config.layer_norm_eps)


def _embedding_sized(config: Any) -> SparseHead:
    size = getattr(config, "embedding_size", None) or config.hidden_size
    return masked_lm_head(size, config.hidden_act, config.layer_norm_eps)


def _family(
    name: str,
    spec: Callable[[Any], EncoderSpec],
    masked_lm: Callable[[Any], SparseHead],
    labels: Callable[[Any], tuple[HeadStep, ...]] = bert_head,
    types: tuple[str, ...] = (),
) -> Family[EncoderSpec]:
    return Family(
        name=name,
        config_types=types or (name,),
        kind="encoder",
        spec=spec,
        tensors=_names,
        heads=HeadReaders(labels=labels, masked_lm=masked_lm),
    )


FAMILIES = (
    _family("albert", albert, _embedding_sized),
    _family("bert", bert, bert_masked_lm),
    _family("deberta-v2", deberta_v2, _embedding_sized, deberta_head),
    _family("distilbert", distilbert, _distilbert_masked_lm, distilbert_head),
    _family("electra", electra, _electra_masked_lm, electra_head),
    _family("ernie", ernie, bert_masked_lm),
    _family("mpnet", mpnet, roberta_masked_lm),
    _family("roberta", roberta, roberta_masked_lm, types=("camembert", "data2vec-text", "roberta", "xlm-roberta")),
    _family("xlm-roberta-xl", xlm_roberta_xl, roberta_masked_lm),
)
