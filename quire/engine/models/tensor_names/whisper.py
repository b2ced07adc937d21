"""Names of Whisper's tensors."""

from __future__ import annotations

from quire.engine.models.tensor_names.rules import KIND, WeightNames, linear_weight

_DECODER = r"decoder\.layers\.(?P<layer>\d+)\."


def encoder_rules(prefix: str) -> tuple[tuple[str, str], ...]:
    """Rules for whisper's encoder. `prefix`: a pattern of the prefix of all names."""
    layer, to = prefix + r"layers\.(?P<index>\d+)\.", "encoder.layers.{index}."
    return (
        (prefix + r"conv(?P<conv>1|2)" + KIND, "encoder.stem.conv{conv}.{kind}"),
        (prefix + r"embed_positions\.weight", "encoder.positions.table"),
        (layer + r"self_attn\.(?P<part>q|k|v)_proj" + KIND, to + "attn.qkv.{kind}"),
        (layer + r"self_attn\.out_proj" + KIND, to + "attn.out.{kind}"),
        (layer + r"self_attn_layer_norm" + KIND, to + "attn_norm.{kind}"),
        (layer + r"fc1" + KIND, to + "ffn.up.{kind}"),
        (layer + r"fc2" + KIND, to + "ffn.down.{kind}"),
        (layer + r"final_layer_norm" + KIND, to + "ffn_norm.{kind}"),
        (prefix + r"layer_norm" + KIND, "encoder.norm.{kind}"),
    )


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
    *encoder_rules(r"encoder\."),
)


WHISPER = WeightNames(
    _RULES,
    ignored=r"proj_out\.weight",
    convert={f"encoder.stem.conv{index}.weight": linear_weight for index in (1, 2)},
    zero_keys=r"(encoder\.)?layers\.\d+\.attn\.qkv\.bias",
)
