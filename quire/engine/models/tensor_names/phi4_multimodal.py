"""Names of the tensors of Phi-4 Multimodal, as transformers and as its authors have written them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from quire.engine.models.errors import WeightMismatch
from quire.engine.models.specs.decoder import AudioEncoderSpec, ConformerLayer
from quire.engine.models.tensor_names.llama import LLAMA
from quire.engine.models.tensor_names.rules import KIND, WeightNames, linear_weight, swap_halves

_LAYER = r"encoder\.encoders\.(?P<index>\d+)\."
_TO = "encoder.layers.{index}."
_RULES = (
    (r"encoder\.encoder_embedding\.global_mean", "encoder.stem.standard.mean"),
    (r"encoder\.encoder_embedding\.global_invstd", "encoder.stem.standard.factor"),
    (r"encoder\.embed\.conv\.0" + KIND, "encoder.stem.first.{kind}"),
    (r"encoder\.embed\.out" + KIND, "encoder.stem.linear.{kind}"),
    (r"encoder\.relative_attention_bias_layer\.bias_values\.weight", "encoder.relative_bias.weight"),
    (_LAYER + r"self_attn\.(?:linear_)?(?P<part>q|k|v)(?:_proj)?" + KIND, _TO + "attn.qkv.{kind}"),
    (_LAYER + r"self_attn\.(?:o_proj|linear_out)" + KIND, _TO + "attn.out.{kind}"),
    (_LAYER + r"layer_norm_att" + KIND, _TO + "attn_norm.{kind}"),
    (_LAYER + r"layer_norm" + KIND, _TO + "out_norm.{kind}"),
    (_LAYER + r"conv\.layer_norm" + KIND, _TO + "conv_norm.{kind}"),
    (_LAYER + r"conv\.glu\.ext_pw_conv_1d" + KIND, _TO + "conv.up.{kind}"),
    (_LAYER + r"conv\.dw_sep_conv_1d\.dw_conv" + KIND, _TO + "conv.over_time.{kind}"),
    (_LAYER + r"conv\.dw_sep_conv_1d\.pw_conv" + KIND, _TO + "conv.mix.{kind}"),
    (_LAYER + r"conv\.ext_pw_conv_1d" + KIND, _TO + "conv.down.{kind}"),
    (r"(?:up_proj_for_speech|audio_projection\.speech\.0)" + KIND, "encoder.projector.linears.0.{kind}"),
    (r"(?:down_proj_for_speech|audio_projection\.speech\.2)" + KIND, "encoder.projector.linears.1.{kind}"),
)
_IGNORED = (
    rf"{LLAMA.ignored}|lm_head\.weight|embed_tokens_extend\.image_embed\..*"
    r"|(?:up|down)_proj_for_vision_speech\..*|audio_projection\.vision\..*"
)
_GLU = re.compile(r"(?P<glu>.*\.conv\.glu)\.(?P<kind>b1|b2|ext_pw_conv_1d\.bias)")


def phi4_multimodal_names(encoder: AudioEncoderSpec) -> WeightNames:
    """How the checkpoints of a model with this encoder name their tensors."""
    convert: dict[str, Callable[[Tensor], Tensor]] = {}
    for index, layer in enumerate(encoder.layers):
        assert isinstance(layer, ConformerLayer)
        to = f"encoder.layers.{index}."
        gates_first = layer.conv.gate != "sigmoid"
        convert |= {f"{to}ffn{ffn}.gate_up.{kind}": swap_halves for ffn in (1, 2) for kind in ("weight", "bias")}
        convert |= {f"{to}conv.{name}.weight": linear_weight for name in ("mix", "down")}
        convert[f"{to}conv.up.weight"] = _gates_first if gates_first else linear_weight
        if gates_first:
            convert[f"{to}conv.up.bias"] = swap_halves
    return WeightNames(
        (*LLAMA.rules, *_RULES, *_feed_forwards(), *_subsampling(encoder)),
        prefixes=r"(?:model\.)?embed_tokens_extend\.audio_embed\.|model\.",
        ignored=_IGNORED,
        convert=convert,
    )


def _feed_forwards() -> Iterator[tuple[str, str]]:
    for number, side in ((1, "in"), (2, "out")):
        ffn = _LAYER + rf"feed_forward_{side}\."
        yield ffn + "layer_norm" + KIND, _TO + f"ffn{number}_norm." + "{kind}"
        yield ffn + r"(?:gate_up_proj|net\.0\.linear)" + KIND, _TO + f"ffn{number}.gate_up." + "{kind}"
        yield ffn + r"(?:down_proj|net\.2)" + KIND, _TO + f"ffn{number}.down." + "{kind}"


def _subsampling(encoder: AudioEncoderSpec) -> Iterator[tuple[str, str]]:
    """The names of a convolution, an activation, then two convolutions and an activation for each further layer."""
    for index in range(len(encoder.stem.convolutions) - 1):
        for name, place in (("channelwise", 2 + 3 * index), ("pointwise", 3 + 3 * index)):
            yield rf"encoder\.embed\.conv\.{place}" + KIND, f"encoder.stem.{name}.{index}." + "{kind}"


def _gates_first(weight: Tensor) -> Tensor:
    return swap_halves(linear_weight(weight))


def join_biases(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with the biases of a convolution, of its values and of its gates added up."""
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        match = _GLU.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        parts = held.setdefault(match["glu"], {})
        parts[match["kind"]] = tensor.clone()  # it is valid until the next one is read
        if len(parts) == 3:
            bias = parts.pop("ext_pw_conv_1d.bias")
            added = torch.cat((parts["b1"].flatten(), parts["b2"].flatten()))
            if bias.shape != added.shape:
                raise WeightMismatch(f"{match['glu']} has biases of {len(bias)} and of {len(added)} elements")
            yield f"{match['glu']}.ext_pw_conv_1d.bias", bias.float() + added.float()
            del held[match["glu"]]
    for glu, parts in held.items():
        raise WeightMismatch(f"{glu} has {', '.join(sorted(parts))} only, of b1, b2 and ext_pw_conv_1d.bias")
