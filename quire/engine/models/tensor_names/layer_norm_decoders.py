"""Names of the tensors of decoders from GPT-2 to Command R."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire.engine.models.specs.decoder import GroupedQueryAttention, TransformerSpec
from quire.engine.models.tensor_names.llama import LLAMA
from quire.engine.models.tensor_names.rules import KIND, LAYER, WeightNames

_BLOCK = LAYER.replace("layers", "h")
_HEADS = ((r"lm_head" + KIND, "head.{kind}"), (r"score" + KIND, "heads.classify.0.{kind}"))
_MASKS = r"h\.\d+\.attn\.(attention\.)?(masked_)?bias|lm_head\.weight"
_GPT = (
    (r"wte\.weight", "embed.weight"),
    (r"wpe\.weight", "embed_sum.positions"),
    (_BLOCK + r"ln_1" + KIND, "attn_norm.{kind}"),
    (_BLOCK + r"ln_2" + KIND, "ffn_norm.{kind}"),
    (_BLOCK + r"attn\.c_attn" + KIND, "attn.qkv.{kind}"),
    (_BLOCK + r"attn\.c_proj" + KIND, "attn.out.{kind}"),
    (_BLOCK + r"attn\.(?:attention\.)?(?P<part>q|k|v)_proj" + KIND, "attn.qkv.{kind}"),  # GPT-Neo, GPT-J
    (_BLOCK + r"attn\.(?:attention\.)?out_proj" + KIND, "attn.out.{kind}"),
    (_BLOCK + r"mlp\.(?:c_fc|fc_in)" + KIND, "ffn.up.{kind}"),
    (_BLOCK + r"mlp\.(?:c_proj|fc_out)" + KIND, "ffn.down.{kind}"),
    (r"ln_f" + KIND, "norm.{kind}"),
    *_HEADS,
)
_NEOX = (
    (r"embed_in\.weight", "embed.weight"),
    (r"embed_out\.weight", "head.weight"),
    (LAYER + r"attention\.query_key_value" + KIND, "attn.qkv.{kind}"),
    (LAYER + r"attention\.dense" + KIND, "attn.out.{kind}"),
    (LAYER + r"mlp\.dense_h_to_4h" + KIND, "ffn.up.{kind}"),
    (LAYER + r"mlp\.dense_4h_to_h" + KIND, "ffn.down.{kind}"),
    (LAYER + r"input_layernorm" + KIND, "attn_norm.{kind}"),
    (LAYER + r"post_attention_layernorm" + KIND, "ffn_norm.{kind}"),
    (r"final_layer_norm" + KIND, "norm.{kind}"),
    *_HEADS,
)
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
    *_HEADS,
)
_FALCON = (
    (r"word_embeddings\.weight", "embed.weight"),
    (r"word_embeddings_layernorm" + KIND, "embed_sum.norm.{kind}"),  # BLOOM
    (_BLOCK + r"self_attention\.query_key_value" + KIND, "attn.qkv.{kind}"),
    (_BLOCK + r"self_attention\.dense" + KIND, "attn.out.{kind}"),
    (_BLOCK + r"mlp\.dense_h_to_4h" + KIND, "ffn.up.{kind}"),
    (_BLOCK + r"mlp\.dense_4h_to_h" + KIND, "ffn.down.{kind}"),
    (_BLOCK + r"(?:input_layernorm|ln_attn)" + KIND, "attn_norm.{kind}"),
    (_BLOCK + r"(?:post_attention_layernorm|ln_mlp)" + KIND, "ffn_norm.{kind}"),
    (r"ln_f" + KIND, "norm.{kind}"),
    *_HEADS,
)
# Llama's names, with layer norms that have biases, and plain feed-forward layers.
_LLAMA_LIKE = (
    *LLAMA.rules,
    (LAYER + r"self_attn\.dense" + KIND, "attn.out.{kind}"),
    (LAYER + r"mlp\.(?:fc1|c_fc)" + KIND, "ffn.up.{kind}"),
    (LAYER + r"mlp\.(?:fc2|c_proj)" + KIND, "ffn.down.{kind}"),
    (LAYER + r"input_layernorm\.bias", "attn_norm.bias"),
    (LAYER + r"post_attention_layernorm\.bias", "ffn_norm.bias"),
    (r"(?:norm|final_layernorm)" + KIND, "norm.{kind}"),
    *_HEADS,
)


def layer_norm_decoder_names(model_type: str, spec: TransformerSpec) -> WeightNames | None:
    """How a decoder of `archs.layer_norm_decoders` names its tensors; None for other decoders."""
    attn = spec.layers[0].attn
    if not isinstance(attn, GroupedQueryAttention):
        return None
    match model_type:
        case "gpt2":
            transposed = ("attn.qkv.weight", "attn.out.weight", "ffn.up.weight", "ffn.down.weight")
            return WeightNames(_GPT, r"transformer\.", _MASKS, convert=dict.fromkeys(transposed, _transpose))
        case "gpt_neo" | "gptj":
            return WeightNames(_GPT, r"transformer\.", _MASKS)
        case "gpt_neox":
            masks = r"layers\.\d+\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)|embed_out\.weight"
            return WeightNames(_NEOX, r"gpt_neox\.", masks, convert=_fused(attn))
        case "opt":
            return WeightNames(_OPT, r"(?:model\.)?decoder\.", r"lm_head\.weight")
        case "falcon" | "bloom":
            return WeightNames(_FALCON, r"transformer\.", r"lm_head\.weight|.*inv_freq", convert=_fused(attn))
        case "phi" | "starcoder2" | "stablelm" | "cohere":
            return WeightNames(_LLAMA_LIKE, ignored=rf"{LLAMA.ignored}|lm_head\.weight")
    return None


def _transpose(weight: Tensor) -> Tensor:
    return weight.T


def _fused(attn: GroupedQueryAttention) -> dict[str, Callable[[Tensor], Tensor]]:
    """Projections that hold, for each key head, its queries, its key and its value."""

    def split(rows: Tensor) -> Tensor:
        grouped = rows.unflatten(0, (attn.kv_heads, -1, attn.head_dim))
        parts = (grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:])
        flat: Tensor = rows.new_empty(rows.shape)
        begin = 0
        for part in parts:
            taken = part.flatten(0, 2)
            flat[begin : begin + len(taken)] = taken
            begin += len(taken)
        return flat

    return {"attn.qkv.weight": split, "attn.qkv.bias": split}
