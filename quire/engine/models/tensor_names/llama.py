"""Names of Llama's tensors, and of decoders that name theirs like it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from quire.engine.models.tensor_names.rules import KIND, LAYER, WeightNames

LM_HEAD = r"lm_head\.weight"
_EXPERTS = LAYER + r"(?:mlp|block_sparse_moe)\.experts\."
_RULES = (
    (r"embed_tokens\.weight", "embed.weight"),
    (LM_HEAD, "head.weight"),
    (r"norm\.weight", "norm.weight"),
    (LAYER + r"self_attn\.(?P<part>q|k|v)_proj" + KIND, "attn.qkv.{kind}"),
    (LAYER + r"self_attn\.qkv_proj" + KIND, "attn.qkv.{kind}"),
    (LAYER + r"self_attn\.q_proj\.weight", "attn.q_b.weight"),  # latent attention without a query rank
    (LAYER + r"self_attn\.o_proj" + KIND, "attn.out.{kind}"),
    (LAYER + r"self_attn\.(?P<side>q|k)_norm\.weight", "attn.{side}_norm.weight"),
    (LAYER + r"self_attn\.sinks", "attn.sinks"),
    (LAYER + r"self_attn\.(?P<side>q|kv)_a_proj(?:_with_mqa)?" + KIND, "attn.{side}_a.{kind}"),
    (LAYER + r"self_attn\.(?P<side>q|kv)_a_layernorm\.weight", "attn.{side}_a_norm.weight"),
    (LAYER + r"self_attn\.(?P<side>q|kv)_b_proj\.weight", "attn.{side}_b.weight"),
    (LAYER + r"mlp\.(?P<part>gate|up)_proj" + KIND, "ffn.gate_up.{kind}"),
    (LAYER + r"mlp\.gate_up_proj" + KIND, "ffn.gate_up.{kind}"),
    (LAYER + r"mlp\.down_proj" + KIND, "ffn.down.{kind}"),
    (LAYER + r"mlp\.shared_experts\.(?P<part>gate|up)_proj\.weight", "ffn.shared.gate_up.weight"),
    (LAYER + r"mlp\.shared_experts\.down_proj\.weight", "ffn.shared.down.weight"),
    (LAYER + r"(?:mlp|block_sparse_moe)\.(?:gate|router)" + KIND, "ffn.router.{kind}"),
    (LAYER + r"mlp\.gate\.e_score_correction_bias", "ffn.score_bias"),
    (_EXPERTS + r"(?P<expert>\d+)\.(?P<part>gate|up)_proj\.weight", "ffn.experts.{expert}.gate_up.weight"),
    (_EXPERTS + r"(?P<expert>\d+)\.down_proj\.weight", "ffn.experts.{expert}.down.weight"),
    (_EXPERTS + r"(?P<expert>\d+)\.(?P<part>w1|w3)\.weight", "ffn.experts.{expert}.gate_up.weight"),
    (_EXPERTS + r"(?P<expert>\d+)\.w2\.weight", "ffn.experts.{expert}.down.weight"),
    (_EXPERTS + r"(?P<stacked>gate_up|down)_proj", "ffn.experts.{{expert}}.{stacked}.weight"),
    (_EXPERTS + r"(?P<stacked>gate_up|down)_proj_bias", "ffn.experts.{{expert}}.{stacked}.bias"),
)
_IGNORED = r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
# Llama's second norm precedes the feed-forward; in models with post-norms it follows the attention.
_NORMS = (
    (LAYER + r"input_layernorm\.weight", "attn_norm.weight"),
    (LAYER + r"post_attention_layernorm\.weight", "ffn_norm.weight"),
)
_POST_NORMS = (
    (LAYER + r"input_layernorm\.weight", "attn_norm.weight"),
    (LAYER + r"post_attention_layernorm\.weight", "attn_output_norm.weight"),
    (LAYER + r"pre_feedforward_layernorm\.weight", "ffn_norm.weight"),
    (LAYER + r"post_feedforward_layernorm\.weight", "ffn_output_norm.weight"),
)
_HEADS = (
    (r"score" + KIND, "heads.classify.0.{kind}"),
    (r"score\.0" + KIND, "heads.classify.0.{kind}"),  # reward models
    (r"score\.2" + KIND, "heads.classify.1.{kind}"),
)

LLAMA = WeightNames((*_RULES, *_NORMS, *_HEADS), ignored=_IGNORED)
LLAMA_OUTPUT_NORMS = WeightNames((*_RULES, *_POST_NORMS, *_HEADS), ignored=_IGNORED)


def unstack_expert(parameter: str, tensor: Tensor) -> Iterator[tuple[int | None, Tensor]]:
    """The projections of one expert of a stacked tensor: their index in the fused weight, and (outputs, inputs) views.

    `tensor`: (inputs, outputs), or a bias (outputs,); outputs of gate and up alternate.
    """
    if ".gate_up." in parameter:
        for part in (0, 1):
            yield part, tensor[..., part::2].mT if tensor.dim() == 2 else tensor[part::2]
    else:
        yield None, tensor.mT if tensor.dim() == 2 else tensor
