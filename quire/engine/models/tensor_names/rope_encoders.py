"""Names of the tensors of encoders after BERT."""

from __future__ import annotations

from quire.engine.models.tensor_names.bert import MASKED_LM
from quire.engine.models.tensor_names.llama import LLAMA
from quire.engine.models.tensor_names.rules import KIND, LAYER, WeightNames, swap_halves

Rules = tuple[tuple[str, str], ...]
_ENCODER_LAYER = LAYER.replace("layers", r"encoder\.layers?")
_EMBEDDINGS = (
    (r"embeddings\.(?:word|tok)_embeddings\.weight", "embed.weight"),
    (r"embeddings\.token_type_embeddings\.weight", "embed_sum.types"),
    (r"(?:embeddings\.LayerNorm|embeddings\.norm|emb_ln)" + KIND, "embed_sum.norm.{kind}"),
)
_COLBERT = ((r"linear\.weight", "heads.token_embed.0.weight"),)
_MODERNBERT = (
    *_EMBEDDINGS,
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
    *_COLBERT,
)
_NOMIC = (
    *_EMBEDDINGS,
    (_ENCODER_LAYER + r"attn\.Wqkv" + KIND, "attn.qkv.{kind}"),
    (_ENCODER_LAYER + r"attn\.out_proj" + KIND, "attn.out.{kind}"),
    (_ENCODER_LAYER + r"norm1" + KIND, "attn_post_ln.{kind}"),
    (_ENCODER_LAYER + r"norm2" + KIND, "ffn_post_ln.{kind}"),
    (_ENCODER_LAYER + r"mlp\.fc(?P<part>11|12)" + KIND, "ffn.gate_up.{kind}"),
    (_ENCODER_LAYER + r"mlp\.fc2" + KIND, "ffn.down.{kind}"),
)
_GTE = (
    *_EMBEDDINGS,
    (_ENCODER_LAYER + r"attention\.qkv_proj" + KIND, "attn.qkv.{kind}"),
    (_ENCODER_LAYER + r"attention\.o_proj" + KIND, "attn.out.{kind}"),
    (_ENCODER_LAYER + r"attn_ln" + KIND, "attn_post_ln.{kind}"),
    (_ENCODER_LAYER + r"mlp_ln" + KIND, "ffn_post_ln.{kind}"),
    (_ENCODER_LAYER + r"mlp\.up_gate_proj" + KIND, "ffn.gate_up.{kind}"),
    (_ENCODER_LAYER + r"mlp\.down_proj" + KIND, "ffn.down.{kind}"),
)
# Jina's embedder v3: names of its authors, and of transformers.
_JINA = (
    *_EMBEDDINGS,
    (_ENCODER_LAYER + r"mixer\.Wqkv" + KIND, "attn.qkv.{kind}"),
    (_ENCODER_LAYER + r"mixer\.out_proj" + KIND, "attn.out.{kind}"),
    (_ENCODER_LAYER + r"norm1" + KIND, "attn_post_ln.{kind}"),
    (_ENCODER_LAYER + r"norm2" + KIND, "ffn_post_ln.{kind}"),
    (r"(?:encoder\.)?" + LAYER + r"mlp\.fc1" + KIND, "ffn.up.{kind}"),
    (r"(?:encoder\.)?" + LAYER + r"mlp\.fc2" + KIND, "ffn.down.{kind}"),
    (LAYER + r"self_attn\.(?P<part>q|k|v)_proj" + KIND, "attn.qkv.{kind}"),
    (LAYER + r"self_attn\.o_proj" + KIND, "attn.out.{kind}"),
    (LAYER + r"post_attention_layernorm" + KIND, "attn_post_ln.{kind}"),
    (LAYER + r"post_mlp_layernorm" + KIND, "ffn_post_ln.{kind}"),
    (r"classifier\.dense" + KIND, "heads.classify.0.{kind}"),
    (r"classifier\.out_proj" + KIND, "heads.classify.1.{kind}"),
)
_EUROBERT = (
    (r"dense" + KIND, "heads.classify.0.{kind}"),
    (r"classifier" + KIND, "heads.classify.{last}.{kind}"),
    *MASKED_LM,
)
_HEADS = (
    *_COLBERT,
    (r"pooler\.dense" + KIND, "heads.classify.0.{kind}"),
    (r"classifier" + KIND, "heads.classify.{last}.{kind}"),
)
_IGNORED = r"pooler\.dense\.\w+|cls\..*|lm_head\..*|head\..*|decoder\..*"


def rope_encoder_names(model_type: str, head_steps: int) -> WeightNames | None:
    """How a newer encoder names its tensors; None for other models. `head_steps`: of the classification head."""

    def heads_of(rules: Rules) -> Rules:
        return tuple((pattern, target.replace("{last}", str(max(0, head_steps - 1)))) for pattern, target in rules)

    heads = heads_of(_HEADS)
    match model_type:
        case "modernbert":
            return WeightNames(_MODERNBERT, ignored=_IGNORED)
        case "nomic_bert":
            return WeightNames((*_NOMIC, *heads, *MASKED_LM), r"(?:model|nomic_bert)\.", _IGNORED)
        case "gte" | "new":
            prefixes, convert = r"(?:model|gte|new)\.", {"ffn.gate_up.weight": swap_halves}
            return WeightNames((*_GTE, *heads, *MASKED_LM), prefixes, _IGNORED, convert=convert)
        case "jina_embeddings_v3":
            return WeightNames((*_JINA, *heads, *MASKED_LM), r"(?:model|roberta)\.", _IGNORED)
        case "eurobert":
            return WeightNames((*LLAMA.rules, *heads_of(_EUROBERT)), ignored=f"{LLAMA.ignored}|{_IGNORED}")
    return None
