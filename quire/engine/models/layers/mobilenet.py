"""MobileNet V5, which encodes the pictures of Gemma 3n: its layers are those of MobileNet V4 (Qin et al. 2024).

Modules and parameters have the names that timm gives them in checkpoints. Images are (images, channels, rows, columns).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

_EPS = 1e-6  # of norms
_STEM = 64  # channels, if the network is not narrower
_FEATURES = 2048  # channels of the result
_DIVISOR = 8  # of numbers of channels
_MOST_LOST = 0.1  # of channels, when their number is rounded


@dataclass(frozen=True, kw_only=True)
class FusedBlock:
    """A convolution to more channels, and a projection back."""

    channels: int
    stride: int = 1
    expansion: int = 4
    kernel: int = 3


@dataclass(frozen=True, kw_only=True)
class InvertedBlock:
    """A projection to more channels and one back, with convolutions of single channels before and between them.

    Attributes:
        start, middle: widths of these; 0: there is none.
    """

    channels: int
    start: int = 0
    middle: int = 0
    stride: int = 1
    expansion: int = 2


@dataclass(frozen=True, kw_only=True)
class AttentionBlock:
    """Attention of all positions to each other, whose heads have keys and values in common.

    Attributes:
        key_stride: keys and values are those of an image that is smaller by it.
    """

    channels: int
    heads: int
    head_dim: int
    key_stride: int = 1
    kernel: int = 3


Block = FusedBlock | InvertedBlock | AttentionBlock


def _attending(count: int, channels: int, heads: int, head_dim: int, key_stride: int) -> list[Block]:
    """Blocks of attention, each before a feed-forward."""
    attention = AttentionBlock(channels=channels, heads=heads, head_dim=head_dim, key_stride=key_stride)
    return [attention, InvertedBlock(channels=channels)] * count


# Of `mobilenetv5_300m_enc`. Each stage begins with a stride of 2.
STAGES: tuple[tuple[Block, ...], ...] = (
    (FusedBlock(channels=128, stride=2), FusedBlock(channels=128), FusedBlock(channels=128)),
    (
        InvertedBlock(channels=256, start=3, middle=5, stride=2, expansion=6),
        *(InvertedBlock(channels=256, start=width, expansion=4) for width in (5, 3, 5, 3)),
    ),
    (
        InvertedBlock(channels=640, start=5, middle=5, stride=2, expansion=6),
        *(InvertedBlock(channels=640, start=5, expansion=4) for _ in range(7)),
        InvertedBlock(channels=640, expansion=1),
        *_attending(14, 640, 12, 64, 2),
    ),
    (
        InvertedBlock(channels=1280, start=5, middle=5, stride=2, expansion=6),
        *_attending(19, 1280, 16, 96, 1),
    ),
)


def rounded_channels(channels: float) -> int:
    """A number of channels as a multiple of eight, which is not much smaller."""
    rounded = max(_DIVISOR, int(channels + _DIVISOR / 2) // _DIVISOR * _DIVISOR)
    return rounded + _DIVISOR if rounded < (1 - _MOST_LOST) * channels else rounded


class MobileNetV5(nn.Module):
    """The encoder: stages of blocks, of which the last two stages' results are joined, projected and averaged."""

    def __init__(self, multiplier: float = 1.0, resolution: int = 16) -> None:
        """Make the encoder.

        Args:
            multiplier: of all numbers of channels.
            resolution: rows and columns of the result.
        """
        super().__init__()
        self._resolution = resolution
        before = _STEM if multiplier < 1 else rounded_channels(_STEM * multiplier)
        self.conv_stem = ConvNorm(3, before, 3, stride=2, bias=True, act=True)
        stages, widths = [], []
        for blocks in STAGES:
            made = []
            for block in blocks:
                width = rounded_channels(block.channels * multiplier)
                made.append(_make_block(block, before, width))
                before = width
            stages.append(nn.Sequential(*made))
            widths.append(before)
        self.blocks = nn.Sequential(*stages)
        self.msfa = Fusion(sum(widths[-2:]))

    def forward(self, pixels: Tensor) -> Tensor:
        """(images, 3, height, width) to (images, 2048, resolution, resolution)."""
        x = self.conv_stem(pixels)
        results = []
        for stage in self.blocks:
            x = stage(x)
            results.append(x)
        fused: Tensor = self.msfa(results[-2], results[-1], self._resolution)
        return fused


def _make_block(block: Block, channels: int, width: int) -> nn.Module:
    """The module of a block. `channels`: of its input; `width`: of its result."""
    match block:
        case FusedBlock():
            return FusedLayer(block, channels, width)
        case InvertedBlock():
            return InvertedLayer(block, channels, width, has_skip=channels == width and block.stride == 1)
        case AttentionBlock():
            return AttentionLayer(block, channels)


class PaddedConv(nn.Conv2d):
    """A convolution whose result has as many rows and columns as its input, divided by the stride and rounded up.

    Of an odd number of zeros around the image one more lies behind it.
    """

    def __init__(self, channels: int, width: int, kernel: int, stride: int, *, groups: int, bias: bool) -> None:
        super().__init__(channels, width, kernel, stride=stride, groups=groups, bias=bias)

    @override
    def forward(self, x: Tensor) -> Tensor:
        around = [zeros for size in (x.shape[3], x.shape[2]) for zeros in self._around(size)]
        return super().forward(F.pad(x, around))

    def _around(self, size: int) -> tuple[int, int]:
        kernel, stride = self.kernel_size[0], self.stride[0]
        zeros = max(0, (-(-size // stride) - 1) * stride + kernel - size)
        return zeros // 2, zeros - zeros // 2


def _conv(channels: int, width: int, kernel: int, *, stride: int = 1, groups: int = 1, bias: bool = False) -> nn.Conv2d:
    if kernel == 1 and stride == 1:
        return nn.Conv2d(channels, width, 1, groups=groups, bias=bias)
    return PaddedConv(channels, width, kernel, stride, groups=groups, bias=bias)


class ChannelNorm(nn.Module):
    """A root mean square norm of the channels of each position."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + _EPS)
        return (normed * self.weight.float()[:, None, None]).to(x.dtype)


class ChannelScale(nn.Module):
    """A factor of each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        return x * self.gamma[:, None, None]


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class ConvNorm(nn.Module):
    """A convolution and a norm, and an activation if there is one."""

    def __init__(self, channels: int, width: int, kernel: int, *, act: bool = False, **options: Any) -> None:
        super().__init__()
        self.conv = _conv(channels, width, kernel, **options)
        self.bn = ChannelNorm(width)
        self._act = act

    def forward(self, x: Tensor) -> Tensor:
        """(images, channels, rows, columns) to (images, width, ...)."""
        normed: Tensor = self.bn(self.conv(x))
        return _gelu(normed) if self._act else normed


class FusedLayer(nn.Module):
    """The modules of a `FusedBlock`."""

    def __init__(self, block: FusedBlock, channels: int, width: int) -> None:
        super().__init__()
        middle = rounded_channels(channels * block.expansion)
        self.conv_exp = _conv(channels, middle, block.kernel, stride=block.stride)
        self.bn1 = ChannelNorm(middle)
        self.conv_pwl = _conv(middle, width, 1)
        self.bn2 = ChannelNorm(width)
        self._has_skip = channels == width and block.stride == 1

    def forward(self, x: Tensor) -> Tensor:
        """(images, channels, rows, columns) to (images, width, ...)."""
        projected: Tensor = self.bn2(self.conv_pwl(_gelu(self.bn1(self.conv_exp(x)))))
        return x + projected if self._has_skip else projected


class InvertedLayer(nn.Module):
    """The modules of an `InvertedBlock`."""

    def __init__(
        self, block: InvertedBlock, channels: int, width: int, *, has_skip: bool, is_scaled: bool = True
    ) -> None:
        """`is_scaled`: the result has a factor for each channel."""
        super().__init__()
        middle = rounded_channels(channels * block.expansion)
        stride = 1 if block.middle else block.stride
        self.dw_start: nn.Module = nn.Identity()
        if block.start:
            self.dw_start = ConvNorm(channels, channels, block.start, stride=stride, groups=channels)
        self.pw_exp = ConvNorm(channels, middle, 1, act=True)
        self.dw_mid: nn.Module = nn.Identity()
        if block.middle:
            self.dw_mid = ConvNorm(middle, middle, block.middle, stride=block.stride, groups=middle, act=True)
        self.pw_proj = ConvNorm(middle, width, 1)
        self.layer_scale = ChannelScale(width) if is_scaled else nn.Identity()
        self._has_skip = has_skip

    def forward(self, x: Tensor) -> Tensor:
        """(images, channels, rows, columns) to (images, width, ...)."""
        projected: Tensor = self.layer_scale(self.pw_proj(self.dw_mid(self.pw_exp(self.dw_start(x)))))
        return x + projected if self._has_skip else projected


class AttentionLayer(nn.Module):
    """The modules of an `AttentionBlock`."""

    def __init__(self, block: AttentionBlock, channels: int) -> None:
        super().__init__()
        self.norm = ChannelNorm(channels)
        self.attn = MultiQueryAttention(block, channels)
        self.layer_scale = ChannelScale(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        scaled: Tensor = self.layer_scale(self.attn(self.norm(x)))
        return x + scaled


class MultiQueryAttention(nn.Module):
    """Attention whose heads have keys and values in common (Shazeer 2019)."""

    def __init__(self, block: AttentionBlock, channels: int) -> None:
        super().__init__()
        self._heads, size = block.heads, block.heads * block.head_dim
        self.query = _Projection(channels, size)
        self.key, self.value = (
            _Projection(channels, block.head_dim, block.kernel if block.key_stride > 1 else 0, block.key_stride)
            for _ in range(2)
        )
        self.output = _Projection(size, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        rows, columns = x.shape[2:]
        # Queries of all heads follow each other, as they read the same keys.
        queries = self.query(x).flatten(2).unflatten(1, (self._heads, -1)).transpose(2, 3).flatten(1, 2)
        keys, values = (projected.flatten(2).transpose(1, 2) for projected in (self.key(x), self.value(x)))
        attended = F.scaled_dot_product_attention(queries[:, None], keys[:, None], values[:, None])[:, 0]
        joined = attended.unflatten(1, (self._heads, -1)).transpose(2, 3).flatten(1, 2)
        out: Tensor = self.output(joined.unflatten(2, (rows, columns)))
        return out


class _Projection(nn.Module):
    """A projection of channels, of an image that a convolution of single channels makes smaller if there is one."""

    def __init__(self, channels: int, width: int, kernel: int = 0, stride: int = 1) -> None:
        super().__init__()
        self._is_reduced = kernel > 0
        if kernel:
            self.down_conv = _conv(channels, channels, kernel, stride=stride, groups=channels)
            self.norm = ChannelNorm(channels)
        self.proj = _conv(channels, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(images, channels, rows, columns) to (images, width, ...)."""
        projected: Tensor = self.proj(self.norm(self.down_conv(x)) if self._is_reduced else x)
        return projected


class Fusion(nn.Module):
    """Joins the results of two stages, of which the second has fewer rows and columns."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.ffn = InvertedLayer(
            InvertedBlock(channels=_FEATURES), channels, _FEATURES, has_skip=False, is_scaled=False
        )
        self.norm = ChannelNorm(_FEATURES)

    def forward(self, large: Tensor, small: Tensor, resolution: int) -> Tensor:
        """The channels of both, projected, with `resolution` rows and columns."""
        size = large.shape[2:]
        x: Tensor = self.ffn(torch.cat((large, F.interpolate(small, size=size, mode="nearest")), 1))
        if any(length % resolution for length in size):
            x = F.interpolate(x, size=(resolution, resolution), mode="bilinear")
        elif any(length != resolution for length in size):
            x = F.avg_pool2d(x, [length // resolution for length in size])
        normed: Tensor = self.norm(x)
        return normed
