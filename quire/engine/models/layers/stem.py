"""Convolutions as linear layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.models.layers.linear import Linear
from quire.engine.models.spec import ChunkedConvStem, ConvStem
from quire.kernels.activation import activation
from quire.kernels.add_scaled import add_scaled

WIDTH = 3  # positions that a convolution reads
_MAX_TIMESCALE = 10_000.0


class ConvStemLayer(nn.Module):
    """See `ConvStem`. Weights are (outputs, WIDTH * inputs), one position's inputs after the other's."""

    def __init__(self, spec: ConvStem, hidden: int, max_positions: int) -> None:
        super().__init__()
        self.act = spec.act
        self.conv1 = Linear(WIDTH * spec.channels, hidden, bias=True)
        self.conv2 = Linear(WIDTH * hidden, hidden, bias=True)
        self.positions = nn.Parameter(torch.empty(max_positions, hidden), requires_grad=False)

    def forward(self, features: Tensor, columns: int) -> Tensor:
        """An even number of columns (channels, columns) of one item to (columns / 2 rounded up, hidden)."""
        x = activation(self.conv1(_windows(features.T, 1)), self.act, in_place=True)
        x = activation(self.conv2(_windows(x, 2)), self.act, in_place=True)[: -(-columns // 2)]
        return add_scaled(x, self.positions[: len(x)])


def _windows(x: Tensor, stride: int) -> Tensor:
    """(columns / stride, WIDTH * channels): what each output reads of x (columns, channels). Zeros surround x."""
    columns, channels = x.shape
    padded = F.pad(x, (0, 0, 1, 1))
    padded = padded.contiguous()
    return torch.as_strided(padded, (columns // stride, WIDTH * channels), (stride * channels, 1))


class ChunkedConvStemLayer(nn.Module):
    """See `ChunkedConvStem`. Weights are (outputs, WIDTH * WIDTH * inputs), the inputs of one point after another's."""

    def __init__(self, spec: ChunkedConvStem, hidden: int) -> None:
        super().__init__()
        self.spec = spec
        square, channels = WIDTH * WIDTH, spec.channels
        self.conv1 = Linear(square, channels, bias=True)
        self.conv2 = Linear(square * channels, channels, bias=True)
        self.conv3 = Linear(square * channels, channels, bias=True)
        self.out = Linear(-(-spec.rows // 8) * channels, hidden)
        self._positions: Tensor | None = None

    def forward(self, features: Tensor, columns: int) -> Tensor:
        """(rows, columns) of one item to (positions, hidden)."""
        chunks = features[:, :columns].split(self.spec.chunk, 1)
        return torch.cat([self._chunk(chunk) for chunk in chunks])

    def _chunk(self, features: Tensor) -> Tensor:
        """The positions of one chunk, which zeros extend: so many convolutions saw in training."""
        columns = features.shape[1]
        x = F.pad(features, (0, self.spec.chunk - columns))[..., None]
        for conv in (self.conv1, self.conv2, self.conv3):
            windows = _halving_windows(x)
            x = activation(conv(windows.flatten(0, 1)), self.spec.act, in_place=True).unflatten(0, windows.shape[:2])
        kept = x[:, : -(-columns // 8)].permute(1, 2, 0).flatten(1)  # of each position, all rows of a channel adjacent
        out: Tensor = self.out(kept)
        return add_scaled(out, self._sinusoids(out)[: len(out)])

    def _sinusoids(self, like: Tensor) -> Tensor:
        """(positions of a chunk, hidden): sines, then cosines."""
        if self._positions is None:
            half = like.shape[1] // 2
            rates = torch.exp(-torch.arange(half).float() * torch.tensor(_MAX_TIMESCALE).log() / (half - 1))
            angles = torch.arange(-(-self.spec.chunk // 8))[:, None] * rates
            self._positions = torch.cat((angles.sin(), angles.cos()), 1).to(like)
        return self._positions


def _halving_windows(x: Tensor) -> Tensor:
    """(rows / 2, columns / 2, WIDTH * WIDTH * channels), both rounded up: what each output reads of x, (rows, columns,
    channels). Zeros surround x."""
    rows, columns, channels = x.shape
    padded = F.pad(x, (0, 0, 1, 1, 1, 1)).contiguous()
    down, right, _ = padded.stride()
    size = (-(-rows // 2), -(-columns // 2), WIDTH, WIDTH * channels)
    return torch.as_strided(padded, size, (2 * down, 2 * right, down, 1)).flatten(2)
