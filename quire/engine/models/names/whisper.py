"""Names of Whisper's tensors."""

from __future__ import annotations

from quire.engine.models.names.rules import KIND, WeightNames, linear_weight

_DECODER = r"decoder\.layers\.(?P<layer>\d+)\."
_ENCODER, _TO = r"encoder\.layers\.(?P<index>\d+)\.", "encoder.layers.{index}."
_RULES = (
    (r"decoder\.embed_tokens\.weight", "embed.weight"),
    (r"decoder\.embed_positions\.weight", "embed_sum.positions"),
    (_DECODER + r"self_attn\.(?P<part>q|k|v)_proj" + KIND, "attn.qkv.{kind}"),
    (_DECODER + r"self_attn\.out_proj" + KIND, "attn.out.{kind}"),
    (_DECODER + r"self_attn_layer_norm" + KIND, "attn_norm.{kind}"),
    (_DECODER + r"encoder_attn\.(?P<side>q|k|v)_proj" + KIND, "cross.{side}.{kind}"),
    (_DECODER + r"encoder_attn\.out_proj" + KIND, "cross.out.{kind}"),
    (_DECODER + r"encoder_attn_layer_norm" + KIND, "cross_norm.{kind}"),
    (_DECODER + r"fc1" + KIND, "ffn.up.{kind}"),
    (_DECODER + r"fc2" + KIND, "ffn.down.{kind}"),
    (_DECODER + r"final_layer_norm" + KIND, "ffn_norm.{kind}"),
    (r"decoder\.layer_norm" + KIND, "norm.{kind}"),
    (r"proj_out\.weight", "head.weight"),
    (r"encoder\.conv(?P<conv>1|2)" + KIND, "encoder.stem.conv{conv}.{kind}"),
    (r"encoder\.embed_positions\.weight", "encoder.positions.table"),
    (_ENCODER + r"self_attn\.(?P<part>q|k|v)_proj" + KIND, _TO + "attn.qkv.{kind}"),
    (_ENCODER + r"self_attn\.out_proj" + KIND, _TO + "attn.out.{kind}"),
    (_ENCODER + r"self_attn_layer_norm" + KIND, _TO + "attn_norm.{kind}"),
    (_ENCODER + r"fc1" + KIND, _TO + "ffn.up.{kind}"),
    (_ENCODER + r"fc2" + KIND, _TO + "ffn.down.{kind}"),
    (_ENCODER + r"final_layer_norm" + KIND, _TO + "ffn_norm.{kind}"),
    (r"encoder\.layer_norm" + KIND, "encoder.norm.{kind}"),
)


WHISPER = WeightNames(
    _RULES,
    ignored=r"proj_out\.weight",
    convert={f"encoder.stem.conv{index}.weight": linear_weight for index in (1, 2)},
    zero_keys=r"(encoder\.)?layers\.\d+\.attn\.qkv\.bias",
)
