"""Weights in the formats of the Triton kernels, as plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.gpu_weights import WeightData


def plain_weight(data: WeightData, size_in: int) -> Tensor:
    """The weight that a format stands for: (size_out, size_in) float64."""
    if data.scales is None:
        return data.values.double()
    if data.kind == "scaled":
        return data.values.double() * data.scales[:, None]
    codes = data.values.unflatten(1, (-1, 64))
    integers = torch.stack((codes & 15, codes >> 4), 2).double() - 8  # (outputs, pairs of groups, 2, 64)
    return (integers.flatten(1, 2) * data.scales[..., None]).flatten(1)[:, :size_in]
