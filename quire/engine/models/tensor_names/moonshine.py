"""Names of Moonshine's tensors."""

from __future__ import annotations

from quire.engine.models.tensor_names.rules import KIND, WeightNames, linear_weight, swap_halves

_DECODER = r"decoder\.layers\.(?P<layer>\d+)\."
_ENCODER, _TO = r"encoder\.layers\.(?P<index>\d+)\.", "encoder.layers.{index}."
_RULES = (
    (r"decoder\.embed_tokens\.weight", "embed.weight"),
    (_DECODER + r"self_attn\.(?P<part>q|k|v)_proj\.weight", "attn.qkv.weight"),
    (_DECODER + r"self_attn\.o_proj\.weight", "attn.out.weight"),
    (_DECODER + r"input_layernorm\.weight", "attn_norm.weight"),
    (_DECODER + r"encoder_attn\.(?P<side>q|k|v)_proj\.weight", "cross.{side}.weight"),
    (_DECODER + r"encoder_attn\.o_proj\.weight", "cross.out.weight"),
    (_DECODER + r"post_attention_layernorm\.weight", "cross_norm.weight"),
    (_DECODER + r"mlp\.fc1" + KIND, "ffn.gate_up.{kind}"),
    (_DECODER + r"mlp\.fc2" + KIND, "ffn.down.{kind}"),
    (_DECODER + r"final_layernorm\.weight", "ffn_norm.weight"),
    (r"decoder\.norm\.weight", "norm.weight"),
    (r"proj_out\.weight", "head.weight"),
    (r"encoder\.conv1\.weight", "encoder.stem.convs.0.linear.weight"),
    (r"encoder\.conv2" + KIND, "encoder.stem.convs.1.linear.{kind}"),
    (r"encoder\.conv3" + KIND, "encoder.stem.convs.2.linear.{kind}"),
    (r"encoder\.groupnorm" + KIND, "encoder.stem.convs.0.norm.{kind}"),
    (_ENCODER + r"self_attn\.(?P<part>q|k|v)_proj\.weight", _TO + "attn.qkv.weight"),
    (_ENCODER + r"self_attn\.o_proj\.weight", _TO + "attn.out.weight"),
    (_ENCODER + r"input_layernorm\.weight", _TO + "attn_norm.weight"),
    (_ENCODER + r"post_attention_layernorm\.weight", _TO + "ffn_norm.weight"),
    (_ENCODER + r"mlp\.fc1" + KIND, _TO + "ffn.up.{kind}"),
    (_ENCODER + r"mlp\.fc2" + KIND, _TO + "ffn.down.{kind}"),
    (r"encoder\.layer_norm\.weight", "encoder.norm.weight"),
)
MOONSHINE = WeightNames(
    _RULES,
    ignored=r"proj_out\.weight",
    convert={
        **{f"encoder.stem.convs.{index}.linear.weight": linear_weight for index in range(3)},
        **dict.fromkeys(("ffn.gate_up.weight", "ffn.gate_up.bias"), swap_halves),
    },
)
