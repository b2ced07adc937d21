"""Weights in the formats of the Triton kernels, as plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.gpu_weights import Rows, WeightData


def plain_rows(rows: Rows) -> Tensor:
    """The rows that quantized ones stand for: float64."""
    if rows.scales is None:
        return rows.values.double()
    group = -(-rows.values.shape[1] // rows.scales.shape[1]) if rows.scales.shape[1] == 1 else 128
    return rows.values.double() * rows.scales.repeat_interleave(group, 1)[:, : rows.values.shape[1]]


def plain_weight(data: WeightData, size_in: int) -> Tensor:
    """The weight that a format stands for: (size_out, size_in) float64."""
    if data.scales is None:
        return data.values.double()
    if data.kind == "scaled":
        return data.values.double() * data.scales[:, None]
    if data.kind == "blocks":
        scales = data.scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return data.values.double() * scales[: len(data.values), :size_in]
    codes = data.values.unflatten(1, (-1, 64))
    integers = torch.stack((codes & 15, codes >> 4), 2).double() - 8  # (outputs, pairs of groups, 2, 64)
    return (integers.flatten(1, 2) * data.scales[..., None]).flatten(1)[:, :size_in]
