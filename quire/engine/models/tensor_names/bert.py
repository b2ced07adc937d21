"""Names of BERT's tensors, and of encoders that name theirs like it."""

from __future__ import annotations

from quire.engine.models.tensor_names.rules import KIND, LAYER, WeightNames, swap_halves

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
_HEADS = (
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


def bert_like(head_steps: int, *, ups_first: bool = False) -> WeightNames:
    """Names of BERT and its relatives.

    Args:
        head_steps: linear layers of the classification head.
        ups_first: gated feed-forward layers have the ups before the gates.
    """
    heads = tuple((pattern, target.replace("{last}", str(max(0, head_steps - 1)))) for pattern, target in _HEADS)
    convert = {"ffn.gate_up.weight": swap_halves} if ups_first else {}
    rules = (*_EMBEDDINGS, *_LAYERS, *_DISTILBERT, *_ALBERT, *heads, *MASKED_LM)
    return WeightNames(rules, prefixes=_PREFIXES, ignored=_IGNORED, gamma_beta=True, convert=convert)
