"""Stems of audio encoders: from features to the input of the layers. Convolutions over time are linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.norm import LayerNorm
from quire.engine.models.specs.audio import (
    CausalConv2dStem,
    CausalConvStem,
    ChunkedConvStem,
    Conv2dStem,
    ConvStem,
    LinearStem,
    Stem,
    StemNorm,
    WaveConv,
    WaveStem,
)
from quire.kernels.activation import activation
from quire.kernels.add_scaled import add_scaled, scaled

WIDTH = 3  # positions that a convolution of a `ConvStem` or a `ChunkedConvStem` reads
_EPS = 1e-5  # of norms between convolutions
_MAX_TIMESCALE = 10_000.0


def make_stem(spec: Stem, hidden: int) -> nn.Module:
    """The layer of a stem: (channels, columns) of one item to (positions, hidden).

    The layers of a `CausalConvStem` and a `CausalConv2dStem` also have a state.
    """
    match spec:
        case ConvStem():
            return ConvStemLayer(spec, hidden)
        case CausalConvStem():
            return CausalConvStemLayer(spec, hidden)
        case ChunkedConvStem():
            return ChunkedConvStemLayer(spec, hidden)
        case WaveStem():
            return WaveStemLayer(spec, hidden)
        case Conv2dStem():
            return Conv2dStemLayer(spec, hidden)
        case CausalConv2dStem():
            return CausalConv2dStemLayer(spec, hidden)
        case LinearStem():
            return LinearStemLayer(spec, hidden)


class ConvStemLayer(nn.Module):
    """The layer of a `ConvStem`. Weights are (outputs, WIDTH * inputs), one position's inputs after the other's."""

    def __init__(self, spec: ConvStem, hidden: int) -> None:
        super().__init__()
        self.act = spec.act
        self.conv1 = Linear(WIDTH * spec.channels, hidden, bias=True)
        self.conv2 = Linear(WIDTH * hidden, hidden, bias=True)

    def forward(self, features: Tensor) -> Tensor:
        """(channels, columns) of one item to (columns / 2 rounded up, hidden)."""
        x = activation(self.conv1(windows(F.pad(features.T, (0, 0, 1, 1)), WIDTH)), self.act, in_place=True)
        return activation(self.conv2(windows(F.pad(x, (0, 0, 1, 1)), WIDTH, 2)), self.act, in_place=True)


class StemState(NamedTuple):
    """Input of the convolutions from earlier pieces, zero before the first one; see `CausalConvStem.state`.

    Attributes:
        columns: (2, channels), the last columns of features.
        inner: (1, hidden), the last position of the first convolution's output.
    """

    columns: Tensor
    inner: Tensor


class CausalConvStemLayer(nn.Module):
    """The layer of a `CausalConvStem`; weights are as in `ConvStemLayer`."""

    def __init__(self, spec: CausalConvStem, hidden: int) -> None:
        super().__init__()
        self.spec = spec
        self.conv1 = Linear(WIDTH * spec.channels, hidden, bias=True)
        self.conv2 = Linear(WIDTH * hidden, hidden, bias=True)

    def forward(self, features: Tensor, state: StemState) -> tuple[Tensor, StemState]:
        """(channels, columns), an even number of them, to (columns / 2, hidden), and the state after them."""
        columns = torch.cat((state.columns, features.T))
        inner = activation(self.conv1(windows(columns, WIDTH)), self.spec.act, in_place=True)
        inner = torch.cat((state.inner, inner))
        x = activation(self.conv2(windows(inner, WIDTH, 2)), self.spec.act, in_place=True)
        return x, StemState(columns[1 - WIDTH :], inner[2 - WIDTH :])


def sinusoidal_table(positions: int, size: int) -> Tensor:
    """(positions, size), an even number of elements: sines, then cosines."""
    half = size // 2
    rates = torch.exp(-torch.arange(half).float() * torch.tensor(_MAX_TIMESCALE).log() / (half - 1))
    angles = torch.arange(positions)[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), 1)


class ChunkedConvStemLayer(nn.Module):
    """The layers of a `ChunkedConvStem`. Weights are (outputs, WIDTH * WIDTH * inputs), point after point."""

    def __init__(self, spec: ChunkedConvStem, hidden: int) -> None:
        super().__init__()
        self.spec = spec
        square, channels = WIDTH * WIDTH, spec.channels
        self.conv1 = Linear(square, channels, bias=True)
        self.conv2 = Linear(square * channels, channels, bias=True)
        self.conv3 = Linear(square * channels, channels, bias=True)
        self.out = Linear(-(-spec.rows // 8) * channels, hidden)
        self._positions: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        """(rows, columns) of one item to (positions, hidden)."""
        return torch.cat([self._chunk(chunk) for chunk in features.split(self.spec.chunk, 1)])

    def _chunk(self, features: Tensor) -> Tensor:
        """The positions of one chunk, which zeros extend: so many convolutions saw in training."""
        columns = features.shape[1]
        x = F.pad(features, (0, self.spec.chunk - columns))[..., None]
        for conv in (self.conv1, self.conv2, self.conv3):
            read = _halving_windows(x)
            x = activation(conv(read.flatten(0, 1)), self.spec.act, in_place=True).unflatten(0, read.shape[:2])
        # Of each position, all rows of a channel are adjacent.
        positions = x[:, : -(-columns // 8)].permute(1, 2, 0).flatten(1)
        out: Tensor = self.out(positions)
        return add_scaled(out, self._sinusoids(out)[: len(out)])

    def _sinusoids(self, like: Tensor) -> Tensor:
        """(positions of a chunk, hidden): sines, then cosines."""
        if self._positions is None:
            self._positions = sinusoidal_table(-(-self.spec.chunk // 8), like.shape[1]).to(like)
        return self._positions


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


class Conv2dStemLayer(nn.Module):
    """The layers of a `Conv2dStem`."""

    def __init__(self, spec: Conv2dStem, hidden: int) -> None:
        super().__init__()
        self.spec = spec
        shape, pairs = (spec.kernel, spec.kernel), spec.layers - 1
        self.first = ConvWeights(spec.channels, 1, *shape)
        self.channelwise = nn.ModuleList(ConvWeights(spec.channels, 1, *shape) for _ in range(pairs))
        self.pointwise = nn.ModuleList(ConvWeights(spec.channels, spec.channels, 1, 1) for _ in range(pairs))
        self.linear = Linear(spec.channels * (spec.bands // 2**spec.layers), hidden, bias=True)
        self.standard = Standardization(spec.bands) if spec.standardized else None

    def forward(self, features: Tensor) -> Tensor:
        """(bands, columns) of one item to (positions, hidden)."""
        if self.standard is not None:
            features = self.standard(features)
        half, channels = self.spec.kernel // 2, self.spec.channels
        x = F.relu(F.conv2d(features.T[None, None], self.first.weight, self.first.bias, 2, half))
        for along, across in zip(self.channelwise, self.pointwise, strict=True):
            assert isinstance(along, ConvWeights)
            assert isinstance(across, ConvWeights)
            x = F.conv2d(x, along.weight, along.bias, 2, half, groups=channels)
            x = F.relu(F.conv2d(x, across.weight, across.bias))
        flat = x[0].transpose(0, 1).flatten(1).contiguous()  # (positions, channels * bands)
        return scaled(self.linear(flat), self.spec.scale)


class CausalConv2dStemLayer(nn.Module):
    """The layers of a `CausalConv2dStem`."""

    def __init__(self, spec: CausalConv2dStem, hidden: int) -> None:
        super().__init__()
        self.spec = spec
        shape, pairs = (spec.kernel, spec.kernel), spec.layers - 1
        self.first = ConvWeights(spec.channels, 1, *shape)
        self.channelwise = nn.ModuleList(ConvWeights(spec.channels, 1, *shape) for _ in range(pairs))
        self.pointwise = nn.ModuleList(ConvWeights(spec.channels, spec.channels, 1, 1) for _ in range(pairs))
        self.linear = Linear(spec.channels * spec.bands_of_layers[-1], hidden, bias=True)

    def forward(
        self, features: Tensor, state: Sequence[Tensor], *, first: bool, last: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute the positions that the next columns of a sequence complete.

        Args:
            features: (bands, columns): unless they are the last, no column lies behind those of the last position.
            state: see `CausalConv2dStem.state`.
            first: no columns precede them.
            last: no more columns follow, so that a zero completes a position.

        Returns:
            (positions, hidden), and the state behind them.
        """
        x, after = features.T[None], []
        for number, before in enumerate(state):
            columns = torch.cat((before, x), 1)
            after.append(columns[:, x.shape[1] :])
            # One column of zeros more than the state has precedes the first one.
            x = F.relu(self._convolved(number, F.pad(columns, (self.spec.kernel - 1, 1, int(first), int(last)))))
        flat = x.transpose(0, 1).flatten(1).contiguous()  # (positions, channels * bands)
        return scaled(self.linear(flat), self.spec.scale), after

    def _convolved(self, number: int, x: Tensor) -> Tensor:
        if not number:
            return F.conv2d(x, self.first.weight, self.first.bias, 2)
        along, across = self.channelwise[number - 1], self.pointwise[number - 1]
        assert isinstance(along, ConvWeights)
        assert isinstance(across, ConvWeights)
        x = F.conv2d(x, along.weight, along.bias, 2, groups=self.spec.channels)
        return F.conv2d(x, across.weight, across.bias)


class Standardization(nn.Module):
    """Shift and scale each band of a spectrogram."""

    def __init__(self, bands: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.empty(bands), requires_grad=False)
        self.factor = nn.Parameter(torch.empty(bands), requires_grad=False)

    def forward(self, features: Tensor) -> Tensor:
        """(bands, columns)."""
        return (features - self.mean[:, None]) * self.factor[:, None]


class LinearStemLayer(nn.Module):
    """The layer of a `LinearStem`."""

    def __init__(self, spec: LinearStem, hidden: int) -> None:
        super().__init__()
        self.linear = Linear(spec.rows, hidden, bias=True)

    def forward(self, features: Tensor) -> Tensor:
        """(rows, columns) of one item to (columns, hidden)."""
        x: Tensor = self.linear(features.T.contiguous())
        return x


class ConvWeights(nn.Module):
    """Weight and bias of a convolution that is computed by torch."""

    def __init__(self, *shape: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(shape[0]), requires_grad=False) if bias else None


def windows(x: Tensor, width: int, stride: int = 1) -> Tensor:
    """(outputs, width * channels): the elements of x (columns, channels) that each output of a convolution reads.

    A view: columns are adjacent in memory.
    """
    x = x.contiguous()
    columns, channels = x.shape
    count = (columns - width) // stride + 1
    return torch.as_strided(x, (count, width * channels), (stride * channels, 1))


def _halving_windows(x: Tensor) -> Tensor:
    """(rows / 2, columns / 2, WIDTH * WIDTH * channels), both rounded up: what each output reads of x, (rows, columns,
    channels). Zeros surround x."""
    rows, columns, channels = x.shape
    padded = F.pad(x, (0, 0, 1, 1, 1, 1)).contiguous()
    down, right, _ = padded.stride()
    size = (-(-rows // 2), -(-columns // 2), WIDTH, WIDTH * channels)
    return torch.as_strided(padded, size, (2 * down, 2 * right, down, 1)).flatten(2)
