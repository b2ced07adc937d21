"""Names of the tensors of CTC models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import Tensor

from quire.engine.models.errors import WeightMismatch
from quire.engine.models.specs.audio import ConvPositions, WaveStem
from quire.engine.models.specs.decoder import AudioEncoderSpec, CTCSpec
from quire.engine.models.tensor_names.rules import KIND, WeightNames, linear_weight

_TO = "encoder.layers.{index}."
_ENCODER = r"encoder\.layers\.(?P<index>\d+)\."
_WAVE = (
    (r"feature_extractor\.conv_layers\.(?P<conv>\d+)\.conv" + KIND, "encoder.stem.convs.{conv}.linear.{kind}"),
    (r"feature_extractor\.conv_layers\.(?P<conv>\d+)\.layer_norm" + KIND, "encoder.stem.convs.{conv}.norm.{kind}"),
    (r"feature_projection\.layer_norm" + KIND, "encoder.stem.norm.{kind}"),
    (r"feature_projection\.projection" + KIND, "encoder.stem.projection.{kind}"),
    (
        r"encoder\.pos_conv_embed\.conv\.groups\.(?P<group>\d+)" + KIND,
        "encoder.positions.groups.{group}.{kind}",
    ),
    (_ENCODER + r"attention\.(?P<part>q|k|v)_proj" + KIND, _TO + "attn.qkv.{kind}"),
    (_ENCODER + r"attention\.out_proj" + KIND, _TO + "attn.out.{kind}"),
    (_ENCODER + r"feed_forward\.intermediate_dense" + KIND, _TO + "ffn.up.{kind}"),
    (_ENCODER + r"feed_forward\.output_dense" + KIND, _TO + "ffn.down.{kind}"),
    (r"lm_head" + KIND, "head.{kind}"),
)
_NORMS_AFTER = (
    (r"encoder\.layer_norm" + KIND, "encoder.positions_norm.{kind}"),
    (_ENCODER + r"layer_norm" + KIND, _TO + "attn_post_ln.{kind}"),
    (_ENCODER + r"final_layer_norm" + KIND, _TO + "ffn_post_ln.{kind}"),
)
_NORMS_BEFORE = (
    (r"encoder\.layer_norm" + KIND, "encoder.norm.{kind}"),
    (_ENCODER + r"layer_norm" + KIND, _TO + "attn_norm.{kind}"),
    (_ENCODER + r"final_layer_norm" + KIND, _TO + "ffn_norm.{kind}"),
)
CONFORMER = (
    (_ENCODER + r"feed_forward(?P<ffn>1|2)\.linear1" + KIND, _TO + "ffn{ffn}.up.{kind}"),
    (_ENCODER + r"feed_forward(?P<ffn>1|2)\.linear2" + KIND, _TO + "ffn{ffn}.down.{kind}"),
    (_ENCODER + r"self_attn\.(?P<part>q|k|v)_proj" + KIND, _TO + "attn.qkv.{kind}"),
    (_ENCODER + r"self_attn\.o_proj" + KIND, _TO + "attn.out.{kind}"),
    (_ENCODER + r"self_attn\.relative_k_proj\.weight", _TO + "attn.distances.weight"),
    (_ENCODER + r"self_attn\.bias_u", _TO + "attn.content_bias"),
    (_ENCODER + r"self_attn\.bias_v", _TO + "attn.distance_bias"),
    (_ENCODER + r"conv\.pointwise_conv1" + KIND, _TO + "conv.up.{kind}"),
    (_ENCODER + r"conv\.depthwise_conv" + KIND, _TO + "conv.over_time.{kind}"),
    (_ENCODER + r"conv\.norm" + KIND, _TO + "conv.norm.{kind}"),
    (_ENCODER + r"conv\.norm\.running_mean", _TO + "conv.norm.mean"),
    (_ENCODER + r"conv\.norm\.running_var", _TO + "conv.norm.variance"),
    (_ENCODER + r"conv\.pointwise_conv2" + KIND, _TO + "conv.down.{kind}"),
    (_ENCODER + r"norm_feed_forward(?P<ffn>1|2)" + KIND, _TO + "ffn{ffn}_norm.{kind}"),
    (_ENCODER + r"norm_self_att" + KIND, _TO + "attn_norm.{kind}"),
    (_ENCODER + r"norm_conv" + KIND, _TO + "conv_norm.{kind}"),
    (_ENCODER + r"norm_out" + KIND, _TO + "out_norm.{kind}"),
    (r"encoder\.subsampling\.linear" + KIND, "encoder.stem.linear.{kind}"),
    (r"encoder\.subsampling\.layers\.0" + KIND, "encoder.stem.first.{kind}"),
    (r"ctc_head" + KIND, "head.{kind}"),
)
_WEIGHT_NORM = re.compile(
    r"(?P<conv>.*pos_conv_embed\.conv)\.(?:weight_(?P<old>[gv])|parametrizations\.weight\.original(?P<new>[01])"
    r"|(?P<plain>weight|bias))"
)


def ctc_names(spec: CTCSpec) -> WeightNames:
    """How the checkpoint of a CTC model names its tensors."""
    encoder = spec.encoder
    if isinstance(encoder.stem, WaveStem):
        weights = [f"encoder.stem.convs.{index}.linear.weight" for index in range(len(encoder.stem.convs))]
        rules = (*_WAVE, *(_NORMS_BEFORE if encoder.final_norm else _NORMS_AFTER))
        return WeightNames(
            rules,
            prefixes=r"(?:wav2vec2|hubert)\.",
            ignored=r"masked_spec_embed",
            convert=dict.fromkeys(weights, linear_weight),
        )
    layers = range(len(encoder.layers))
    weights = [f"encoder.layers.{index}.conv.{name}.weight" for index in layers for name in ("up", "down")]
    return WeightNames(
        (*CONFORMER, *_subsampling(encoder)),
        ignored=r".*\.num_batches_tracked",
        convert=dict.fromkeys([*weights, "head.weight"], linear_weight),
    )


def _subsampling(encoder: AudioEncoderSpec) -> Iterator[tuple[str, str]]:
    """The names of a convolution, an activation, then two convolutions and an activation for each further layer."""
    for index in range(len(encoder.stem.convolutions) - 1):
        for name, place in (("channelwise", 2 + 3 * index), ("pointwise", 3 + 3 * index)):
            yield rf"encoder\.subsampling\.layers\.{place}" + KIND, f"encoder.stem.{name}.{index}." + "{kind}"


def split_positions(tensors: Iterable[tuple[str, Tensor]], spec: AudioEncoderSpec) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with the groups of the convolution for positions apart, as weights of linear layers.

    The norm of each of its taps may be a tensor of its own (weight normalization).
    """
    positions = spec.positions
    groups = positions.groups if isinstance(positions, ConvPositions) else 1
    held: dict[str, Tensor] = {}
    for name, tensor in tensors:
        match = _WEIGHT_NORM.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        conv, kind = match["conv"], match["old"] or match["new"]
        if kind is not None:
            held["norm" if kind in "g0" else "direction"] = tensor.clone()  # it is valid until the next one is read
            if len(held) < 2:
                continue
            direction = held["direction"].float()
            if direction.dim() != 3:
                raise WeightMismatch(f"{name}: the weight of a convolution has 3 dimensions, not {direction.dim()}")
            tensor = direction * (held["norm"].float() / direction.norm(dim=(0, 1), keepdim=True))
        suffix = "bias" if match["plain"] == "bias" else "weight"
        for group, part in enumerate(tensor.chunk(groups)):
            yield f"{conv}.groups.{group}.{suffix}", linear_weight(part) if suffix == "weight" else part
