"""Convolutions over time as linear layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.models.layers.linear import Linear
from quire.engine.models.spec import ConvStem
from quire.kernels.activation import activation

WIDTH = 3  # positions that a convolution reads


class ConvStemLayer(nn.Module):
    """See `ConvStem`. Weights are (outputs, WIDTH * inputs), one position's inputs after the other's."""

    def __init__(self, spec: ConvStem, hidden: int) -> None:
        super().__init__()
        self.act = spec.act
        self.conv1 = Linear(WIDTH * spec.channels, hidden, bias=True)
        self.conv2 = Linear(WIDTH * hidden, hidden, bias=True)

    def forward(self, features: Tensor) -> Tensor:
        """(channels, columns) of one item, as many columns as twice the positions, to (positions, hidden)."""
        x = activation(self.conv1(_windows(features.T, 1)), self.act, in_place=True)
        return activation(self.conv2(_windows(x, 2)), self.act, in_place=True)


def _windows(x: Tensor, stride: int) -> Tensor:
    """(columns / stride, WIDTH * channels): what each output reads of x (columns, channels). Zeros surround x."""
    columns, channels = x.shape
    padded = F.pad(x, (0, 0, 1, 1))
    padded = padded.contiguous()
    return torch.as_strided(padded, (columns // stride, WIDTH * channels), (stride * channels, 1))
