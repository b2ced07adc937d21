"""Weights in the formats of the Triton kernels: of one linear layer, or of a layer's experts in one tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.native import LANES
from quire.kernels.quantize import LIMITS, quantize_rows
from quire.kernels.quantized import bits_for, to_4_bits, to_8_bits
from quire.kernels.take_rows import take_rows

_PART = 1 << 24  # elements quantized at a time, which takes several times their memory


class WeightData(NamedTuple):
    """A weight (size_out, size_in), or several, as the kernels read it.

    Attributes:
        kind: a format of `quire.kernels.triton.products`.
        values: (..., size_out, size_in), or (..., size_out, bytes).
        scales: float32 (..., size_out), or (..., size_out, groups); None for the format "plain".
    """

    kind: str
    values: Tensor
    scales: Tensor | None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)


class Rows(NamedTuple):
    """Inputs of a product: (rows, size_in), and their scales if they are quantized."""

    values: Tensor
    scales: Tensor | None


def format_weight(weight: Tensor, quantization: str) -> WeightData:
    """Quantize a weight (size_out, size_in) as asked for, if its size allows it."""
    kind = _kind(weight.shape[1], quantization)
    if kind is None:
        return WeightData("plain", weight, None)
    quantize = {"int8": _int8, "int4": _int4, "fp8": _fp8}[kind]
    parts = [quantize(part.float()) for part in weight.split(max(1, _PART // weight.shape[1]))]
    values, scales = (torch.cat(part) for part in zip(*parts, strict=True))
    return WeightData("int4" if kind == "int4" else "scaled", values, scales)


def _kind(size_in: int, quantization: str) -> str | None:
    if quantization == "fp8":
        return "fp8" if size_in % LANES == 0 else None
    return {None: None, 4: "int4", 8: "int8"}[bits_for(size_in, quantization)]


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    integers, scale = to_8_bits(weight)
    return integers, scale[:, 0]


def _fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / LIMITS[torch.float8_e4m3fn]
    return (weight / torch.where(scale == 0, 1.0, scale)).to(torch.float8_e4m3fn), scale[:, 0]


def _int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of two groups in the same bytes; see `quire.kernels.triton.products`."""
    integers, scale = to_4_bits(weight)  # (outputs, groups, 64) and (outputs, groups)
    padding = integers.shape[1] % 2
    codes = (F.pad(integers, (0, 0, 0, padding)) + 8).to(torch.uint8).unflatten(1, (-1, 2))
    return (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1), F.pad(scale, (0, padding)).contiguous()


def prepare_rows(x: Tensor, weight: WeightData) -> Rows:
    """The rows (rows, size_in) as products with the weight read them."""
    x = x if x.stride(1) == 1 else x.contiguous()
    if weight.kind != "scaled":
        return Rows(x, None)
    values, scales = quantize_rows(x, weight.values.dtype)
    return Rows(values, scales)


class GpuWeight:
    """The weight of a linear layer; see `PackedWeight`."""

    def __init__(self, weight: Tensor, quantization: str) -> None:
        """weight: (size_out, size_in)."""
        self.size_out = len(weight)
        self.data = format_weight(weight, quantization)
        self.nbytes = self.data.nbytes

    def __call__(
        self,
        x: Tensor,
        bias: Tensor | None,
        *,
        act: str | None = None,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """act(x W^T + b); see `PackedWeight`."""
        from quire.kernels.triton.matmul import matmul

        rows = prepare_rows(x, self.data)
        if out is None:
            out = torch.empty((len(x), self.size_out), dtype=out_dtype or x.dtype, device=x.device)
        kind, values, scales = self.data
        return matmul(rows.values, values, out, kind=kind, x_scales=rows.scales, scales=scales, bias=bias, act=act)


class PlainGpuWeight(GpuWeight):
    """A weight that is multiplied in its own dtype, by kernels that sum in the same order for any number of rows."""

    def __init__(self, weight: Tensor) -> None:
        """weight: (size_out, size_in); it is not copied."""
        super().__init__(weight, "none")

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight by their indices: (n, size_in)."""
        return take_rows(self.data.values, indices)


class StackedWeights:
    """The weights of one projection of all experts, in one tensor that is filled expert by expert."""

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self._data: WeightData | None = None

    @property
    def is_used(self) -> bool:
        """Whether weights were put here."""
        return self._data is not None

    @property
    def data(self) -> WeightData:
        """The weights, with the experts as first dimension."""
        assert self._data is not None
        return self._data

    def put(self, expert: int, weight: Tensor, quantization: str) -> int:
        """Copy an expert's weight (size_out, size_in) to its place; returns the bytes that it takes there."""
        data = format_weight(weight, quantization)
        if self._data is None:
            scales = None if data.scales is None else _stacked(data.scales, self.experts)
            self._data = WeightData(data.kind, _stacked(data.values, self.experts), scales)
        self._data.values[expert] = data.values
        if self._data.scales is not None and data.scales is not None:
            self._data.scales[expert] = data.scales
        return data.nbytes


def _stacked(one: Tensor, experts: int) -> Tensor:
    return torch.empty((experts, *one.shape), dtype=one.dtype, device=one.device)
