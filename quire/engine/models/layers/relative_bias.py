"""Learned biases of attention scores by distance (T5, Raffel et al. 2020)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from quire.engine.models.specs.decoder import ClippedBias, RelativeBias
from quire.kernels.take_rows import take_rows


class RelativeBiasTable(nn.Module):
    """One row of biases per bucket of distances, one column per head."""

    derived_from_weights = ("_bias",)  # made when first needed

    def __init__(self, spec: RelativeBias | ClippedBias, heads: int) -> None:
        super().__init__()
        self.spec = spec
        if isinstance(spec, ClippedBias):
            self._reach, rows = spec.reach, 2 * spec.reach
        else:
            self._reach, rows = spec.max_distance, spec.buckets
        self.weight = nn.Parameter(torch.empty(rows, heads), requires_grad=False)
        self._bias: Tensor | None = None

    def forward(self) -> Tensor:
        """(heads, 2 * reach + 1) float32, from the key that is farthest before a query to the one behind it."""
        if self._bias is None:
            relative = torch.arange(-self._reach, self._reach + 1, device=self.weight.device)
            self._bias = take_rows(self.weight, _rows(self.spec, relative)).float().T.contiguous()
        return self._bias


def _rows(spec: RelativeBias | ClippedBias, relative: Tensor) -> Tensor:
    """The row of the table for each distance of a key to the query."""
    if isinstance(spec, ClippedBias):
        return (relative + spec.reach).clamp(max=2 * spec.reach - 1)
    # Half of the buckets for each direction; of these half for single distances, the others logarithmic.
    half = spec.buckets // 2
    exact = half // 2
    distance = relative.abs()
    far = torch.log(distance.clamp(min=1).float() / exact) / math.log(spec.max_distance / exact)
    large = (exact + (far * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(relative > 0, half, 0) + torch.where(distance < exact, distance, large)
