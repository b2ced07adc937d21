"""Learned biases of attention scores by distance (T5, Raffel et al. 2020)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from quire.engine.models.spec import RelativeBias
from quire.kernels.take_rows import take_rows


class RelativeBiasTable(nn.Module):
    """One row of biases per bucket of distances, one column per head."""

    def __init__(self, spec: RelativeBias, heads: int) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.buckets, heads), requires_grad=False)
        self._bias: Tensor | None = None

    def forward(self) -> Tensor:
        """(heads, 2 * max_distance + 1) float32, from the key that is farthest before a query to the one behind it."""
        if self._bias is None:
            relative = torch.arange(-self.spec.max_distance, self.spec.max_distance + 1)
            self._bias = take_rows(self.weight, self._buckets(relative)).float().T.contiguous()
        return self._bias

    def _buckets(self, relative: Tensor) -> Tensor:
        """Half of the buckets for each direction; of these half for single distances, the others logarithmic."""
        half = self.spec.buckets // 2
        exact = half // 2
        distance = relative.abs()
        far = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.spec.max_distance / exact)
        large = (exact + (far * (half - exact)).long()).clamp(max=half - 1)
        return torch.where(relative > 0, half, 0) + torch.where(distance < exact, distance, large)
