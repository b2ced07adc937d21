"""Position embeddings of audio encoders."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.stem import sinusoidal_table, windows
from quire.engine.models.specs.audio import ConvPositions, LearnedPositions, Positions, SinusoidalPositions
from quire.kernels.activation import activation
from quire.kernels.add_scaled import add_scaled


def make_positions(spec: Positions | None, max_positions: int, hidden: int) -> nn.Module:
    """The layer: (positions, hidden) of one item to the same shape."""
    match spec:
        case LearnedPositions():
            return LearnedPositionsLayer(max_positions, hidden)
        case SinusoidalPositions():
            return SinusoidalPositionsLayer(max_positions)
        case ConvPositions():
            return ConvPositionsLayer(spec, hidden)
        case None:
            return nn.Identity()


class LearnedPositionsLayer(nn.Module):
    """Add the table of `LearnedPositions`."""

    def __init__(self, max_positions: int, hidden: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(max_positions, hidden), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(positions, hidden) of one item."""
        return add_scaled(x, self.table[: len(x)])


class SinusoidalPositionsLayer(nn.Module):
    """Add the table of `SinusoidalPositions`, which is made when it is first needed."""

    def __init__(self, max_positions: int) -> None:
        super().__init__()
        self._max_positions = max_positions
        self._table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(positions, hidden) of one item."""
        if self._table is None:
            self._table = sinusoidal_table(self._max_positions, x.shape[1]).to(x)
        return add_scaled(x, self._table[: len(x)])


class ConvPositionsLayer(nn.Module):
    """Add the convolution of `ConvPositions`. Each group is a linear layer with weights as in `ConvStemLayer`."""

    def __init__(self, spec: ConvPositions, hidden: int) -> None:
        super().__init__()
        self.spec = spec
        size = hidden // spec.groups
        self.groups = nn.ModuleList(Linear(spec.kernel * size, size, bias=True) for _ in range(spec.groups))

    def forward(self, x: Tensor) -> Tensor:
        """(positions, hidden) of one item."""
        kernel = self.spec.kernel
        padded = F.pad(x, (0, 0, kernel // 2, (kernel - 1) // 2))
        parts = zip(self.groups, padded.chunk(self.spec.groups, 1), strict=True)
        convolved = torch.cat([group(windows(part, kernel)) for group, part in parts], 1)
        return add_scaled(x, activation(convolved, self.spec.act, in_place=True))
