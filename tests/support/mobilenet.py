"""MobileNet V5 in plain operators, written from its description, in the place of timm's, which transformers needs."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nVisionConfig

from quire.engine.models.layers.mobilenet import MobileNetV5

_HEADS = {2: 12, 3: 16}  # by stage


def encode(weights: dict[str, Tensor], pixels: Tensor, resolution: int) -> Tensor:
    """(images, 3, height, width) to (images, 2048, resolution, resolution). `weights`: by their names in timm."""
    x = F.gelu(_conv_norm(weights, "conv_stem.", pixels, stride=2), approximate="tanh")
    results = []
    for stage in range(4):
        block = 0
        while any(name.startswith(f"blocks.{stage}.{block}.") for name in weights):
            x = _block(weights, f"blocks.{stage}.{block}.", x, stage, 2 if block == 0 else 1)
            block += 1
        results.append(x)
    _, _, large, small = results
    scale = large.shape[2] // small.shape[2]
    joined = torch.cat((large, small.repeat_interleave(scale, 2).repeat_interleave(scale, 3)), 1)
    x = _feed_forward(weights, "msfa.ffn.", joined)
    images, channels, height, width = x.shape
    cells = x.reshape(images, channels, resolution, height // resolution, resolution, width // resolution)
    return _norm(cells.mean((3, 5)), weights["msfa.norm.weight"])


def _block(weights: dict[str, Tensor], at: str, x: Tensor, stage: int, stride: int) -> Tensor:
    if f"{at}conv_exp.weight" in weights:
        wide = F.gelu(
            _norm(_conv(x, weights[f"{at}conv_exp.weight"], stride), weights[f"{at}bn1.weight"]), approximate="tanh"
        )
        result = _norm(_conv(wide, weights[f"{at}conv_pwl.weight"]), weights[f"{at}bn2.weight"])
    elif f"{at}attn.query.proj.weight" in weights:
        result = _attention(weights, f"{at}attn.", _norm(x, weights[f"{at}norm.weight"]), _HEADS[stage])
    else:
        result = _feed_forward(weights, at, x, stride)
    if f"{at}layer_scale.gamma" in weights:
        result = torch.einsum("ncij,c->ncij", result, weights[f"{at}layer_scale.gamma"])
    return result + x if result.shape == x.shape else result


def _feed_forward(weights: dict[str, Tensor], at: str, x: Tensor, stride: int = 1) -> Tensor:
    has_middle = f"{at}dw_mid.conv.weight" in weights
    if f"{at}dw_start.conv.weight" in weights:
        x = _conv_norm(weights, f"{at}dw_start.", x, 1 if has_middle else stride)
    x = F.gelu(_conv_norm(weights, f"{at}pw_exp.", x), approximate="tanh")
    if has_middle:
        x = F.gelu(_conv_norm(weights, f"{at}dw_mid.", x, stride), approximate="tanh")
    return _conv_norm(weights, f"{at}pw_proj.", x)


def _attention(weights: dict[str, Tensor], at: str, x: Tensor, heads: int) -> Tensor:
    queries = _conv(x, weights[f"{at}query.proj.weight"])
    images, size, rows, columns = queries.shape
    queries = queries.reshape(images, heads, size // heads, rows * columns)
    sides = []
    for side in ("key", "value"):
        source = x
        if f"{at}{side}.down_conv.weight" in weights:
            source = _norm(_conv(x, weights[f"{at}{side}.down_conv.weight"], 2), weights[f"{at}{side}.norm.weight"])
        sides.append(_conv(source, weights[f"{at}{side}.proj.weight"]).flatten(2))
    keys, values = sides
    scores = torch.einsum("nhdq,ndk->nhqk", queries, keys) / (size // heads) ** 0.5
    attended = torch.einsum("nhqk,ndk->nhdq", scores.softmax(-1), values)
    return _conv(attended.reshape(images, size, rows, columns), weights[f"{at}output.proj.weight"])


def _conv_norm(weights: dict[str, Tensor], at: str, x: Tensor, stride: int = 1) -> Tensor:
    convolved = _conv(x, weights[f"{at}conv.weight"], stride, weights.get(f"{at}conv.bias"))
    return _norm(convolved, weights[f"{at}bn.weight"])


def _conv(x: Tensor, weight: Tensor, stride: int = 1, bias: Tensor | None = None) -> Tensor:
    """As TensorFlow pads it: the result has as many rows and columns as the input, divided by the stride."""
    kernel = weight.shape[2]
    zeros = max(0, (-(-x.shape[2] // stride) - 1) * stride + kernel - x.shape[2])
    assert x.shape[2] == x.shape[3]
    x = F.pad(x, (zeros // 2, zeros - zeros // 2) * 2)
    return F.conv2d(x, weight, bias, stride=stride, groups=x.shape[1] // weight.shape[1])


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.movedim(1, -1), weight.shape, weight, 1e-6).movedim(-1, 1)


class TimmStandIn(PreTrainedModel):  # type: ignore[misc]
    """What transformers makes of the vision config of Gemma 3n, in the place of its wrapper of timm's encoder.

    The shapes and names of parameters are those of Quire's tower, which were compared with timm's.
    """

    config_class: ClassVar[Any] = Gemma3nVisionConfig
    base_model_prefix = "timm_model"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        fields = config.model_args
        self._resolution = fields["msfa_output_resolution"]
        self.timm_model: nn.Module = MobileNetV5(fields["channel_multiplier"], self._resolution)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        return None

    def forward(self, pixel_values: Tensor, **_: Any) -> BaseModelOutputWithPooling:
        weights: dict[str, Tensor] = dict(self.timm_model.named_parameters())
        return BaseModelOutputWithPooling(last_hidden_state=encode(weights, pixel_values, self._resolution))


AutoModel.register(Gemma3nVisionConfig, TimmStandIn, exist_ok=True)
