"""Stems of audio encoders: from features to the input of the layers. Convolutions over time are linear layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.models.audio_spec import ConvStem, GridStem, Stem, StemNorm, WaveConv, WaveStem
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.norm import LayerNorm
from quire.kernels.activation import activation
from quire.kernels.add_scaled import scaled

WIDTH = 3  # positions that a convolution of a `ConvStem` reads
_EPS = 1e-5  # of norms between convolutions


def make_stem(spec: Stem, hidden: int) -> nn.Module:
    """The layer of a stem: (channels, columns) of one item to (positions, hidden)."""
    match spec:
        case ConvStem():
            return ConvStemLayer(spec, hidden)
        case WaveStem():
            return WaveStemLayer(spec, hidden)
        case GridStem():
            return GridStemLayer(spec, hidden)


class ConvStemLayer(nn.Module):
    """The layer of a `ConvStem`. Weights are (outputs, WIDTH * inputs), one position's inputs after the other's."""

    def __init__(self, spec: ConvStem, hidden: int) -> None:
        super().__init__()
        self.act = spec.act
        self.conv1 = Linear(WIDTH * spec.channels, hidden, bias=True)
        self.conv2 = Linear(WIDTH * hidden, hidden, bias=True)

    def forward(self, features: Tensor) -> Tensor:
        """(channels, columns) of one item, as many columns as twice the positions, to (positions, hidden)."""
        x = activation(self.conv1(windows(F.pad(features.T, (0, 0, 1, 1)), WIDTH)), self.act, in_place=True)
        return activation(self.conv2(windows(F.pad(x, (0, 0, 1, 1)), WIDTH, 2)), self.act, in_place=True)


class WaveStemLayer(nn.Module):
    """The layers of a `WaveStem`."""

    def __init__(self, spec: WaveStem, hidden: int) -> None:
        super().__init__()
        sizes = [1, *(conv.size for conv in spec.convs)]
        self.convs = nn.ModuleList(WaveConvLayer(conv, size) for conv, size in zip(spec.convs, sizes, strict=False))
        self.norm = None if spec.projection_norm is None else LayerNorm(sizes[-1], spec.projection_norm)
        self.projection = Linear(sizes[-1], hidden, bias=True) if spec.projection else None

    def forward(self, features: Tensor) -> Tensor:
        """(1, samples) of one item to (positions, hidden)."""
        x = features.T
        for conv in self.convs:
            x = conv(x)
        x = x if self.norm is None else self.norm(x)
        return x if self.projection is None else self.projection(x)


class WaveConvLayer(nn.Module):
    """The layer of a `WaveConv`; weights are as in `ConvStemLayer`."""

    def __init__(self, spec: WaveConv, size: int) -> None:
        """`size`: channels of the input."""
        super().__init__()
        self.spec = spec
        self.linear = Linear(spec.kernel * size, spec.size, bias=spec.bias)
        self.norm = None if spec.norm is None else LayerNorm(spec.size, _EPS)

    def forward(self, x: Tensor) -> Tensor:
        """(columns, channels) to (positions, size)."""
        spec = self.spec
        x = self.linear(windows(x, spec.kernel, spec.stride))
        if not spec.norm_last:
            x = self._normed(x)
        x = activation(x, spec.act, in_place=True)
        return self._normed(x) if spec.norm_last else x

    def _normed(self, x: Tensor) -> Tensor:
        if self.norm is None:
            return x
        if self.spec.norm is StemNorm.POSITION:
            normed: Tensor = self.norm(x)
            return normed
        assert self.norm.bias is not None
        wide = x.float()
        together = [0] if self.spec.norm is StemNorm.CHANNEL else [0, 1]
        variance, mean = torch.var_mean(wide, together, correction=0)
        factor = self.norm.weight.float() * torch.rsqrt(variance + _EPS)
        return ((wide - mean) * factor + self.norm.bias.float()).to(x.dtype)


class GridStemLayer(nn.Module):
    """The layers of a `GridStem`."""

    def __init__(self, spec: GridStem, hidden: int) -> None:
        super().__init__()
        self.spec = spec
        shape, pairs = (spec.kernel, spec.kernel), spec.layers - 1
        self.first = ConvWeights(spec.channels, 1, *shape)
        self.channelwise = nn.ModuleList(ConvWeights(spec.channels, 1, *shape) for _ in range(pairs))
        self.pointwise = nn.ModuleList(ConvWeights(spec.channels, spec.channels, 1, 1) for _ in range(pairs))
        self.linear = Linear(spec.channels * (spec.bands // 2**spec.layers), hidden, bias=True)

    def forward(self, features: Tensor) -> Tensor:
        """(bands, columns) of one item to (positions, hidden)."""
        half, channels = self.spec.kernel // 2, self.spec.channels
        x = F.relu(F.conv2d(features.T[None, None], self.first.weight, self.first.bias, 2, half))
        for along, across in zip(self.channelwise, self.pointwise, strict=True):
            assert isinstance(along, ConvWeights)
            assert isinstance(across, ConvWeights)
            x = F.conv2d(x, along.weight, along.bias, 2, half, groups=channels)
            x = F.relu(F.conv2d(x, across.weight, across.bias))
        flat = x[0].transpose(0, 1).flatten(1).contiguous()  # (positions, channels * bands)
        return scaled(self.linear(flat), self.spec.scale)


class ConvWeights(nn.Module):
    """Weight and bias of a convolution that is computed by torch."""

    def __init__(self, *shape: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(shape[0]), requires_grad=False) if bias else None


def windows(x: Tensor, width: int, stride: int = 1) -> Tensor:
    """(outputs, width * channels): what each output of a convolution reads of x (columns, channels).

    A view: columns are adjacent in memory.
    """
    x = x.contiguous()
    columns, channels = x.shape
    count = (columns - width) // stride + 1
    return torch.as_strided(x, (count, width * channels), (stride * channels, 1))
