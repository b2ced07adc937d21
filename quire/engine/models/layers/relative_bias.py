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

    def forward(self, longest: int) -> Tensor:
        """(heads, longest, longest) float32."""
        if self._bias is None or self._bias.shape[1] < longest:
            self._bias = self._make(longest)
        return self._bias[:, :longest, :longest]

    def _make(self, longest: int) -> Tensor:
        position = torch.arange(longest)
        buckets = self._buckets(position - position[:, None])
        return take_rows(self.weight, buckets.flatten()).float().view(longest, longest, -1).permute(2, 0, 1)

    def _buckets(self, relative: Tensor) -> Tensor:
        """Half of the buckets for each direction; of these half for single distances, the others logarithmic."""
        half = self.spec.buckets // 2
        exact = half // 2
        distance = relative.abs()
        far = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.spec.max_distance / exact)
        large = (exact + (far * (half - exact)).long()).clamp(max=half - 1)
        return torch.where(relative > 0, half, 0) + torch.where(distance < exact, distance, large)
