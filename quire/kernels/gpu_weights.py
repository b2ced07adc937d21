"""Weights in the formats of the Triton kernels: of one linear layer, or of a layer's experts in one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.native import LANES
from quire.kernels.quantize import LIMITS, quantize_rows
from quire.kernels.quantized import bits_for, to_4_bits, to_8_bits
from quire.kernels.take_rows import take_rows

BLOCK = 128  # outputs, and inputs, of float8 weights that share a scale in the format "blocks"
_PART = 1 << 24  # elements quantized at a time, which takes several times their memory


class WeightData(NamedTuple):
    """A weight (size_out, size_in), or several, as the kernels read it.

    Attributes:
        kind: a format of `quire.kernels.triton.products`.
        values: (..., size_out, size_in), or (..., size_out, bytes).
        scales: float32 (..., size_out), or (..., size_out, groups), or (..., blocks of outputs, blocks of inputs); None
            for the format "plain".
    """

    kind: str
    values: Tensor
    scales: Tensor | None

    @property
    def scale_rows(self) -> int:
        """Outputs that share a scale."""
        return BLOCK if self.kind == "blocks" else 1

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
    size_in = weight.shape[1]
    if quantization in ("fp8", "fp8_blocks"):
        name = quantization if size_in % LANES == 0 else None
    else:
        name = {None: None, 4: "int4", 8: "int8"}[bits_for(size_in, quantization)]
    if name is None:
        return WeightData("plain", weight, None)
    kind, quantize = _QUANTIZE[name]
    rows = max(1, _PART // (size_in * BLOCK)) * BLOCK
    parts = [quantize(part.float()) for part in weight.split(rows)]
    values, scales = (torch.cat(part) for part in zip(*parts, strict=True))
    return WeightData(kind, values, scales)


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


def _fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Float8 with a scale for each block.

    Scales make the largest element of a block 448, or are the next power of two, whichever is closer to the weight: of
    a weight that was float8 with blocks of either kind before, the values are found again.
    """
    (size_out, size_in), limit = weight.shape, LIMITS[torch.float8_e4m3fn]
    padded = F.pad(weight, (0, -size_in % BLOCK, 0, -size_out % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2)  # (rows, columns, 128, 128)
    scale = blocks.abs().amax((2, 3)) / limit
    scale = torch.where(scale == 0, 1.0, scale)
    candidates = []
    for candidate_scale in (scale, torch.exp2(scale.log2().ceil())):
        values = (blocks / candidate_scale[..., None, None]).to(torch.float8_e4m3fn)
        error = (values.float() * candidate_scale[..., None, None] - blocks).abs().amax((2, 3))
        candidates.append((values, candidate_scale, error))
    (values, scale, error), (other, power, other_error) = candidates
    better = other_error < error
    values = torch.where(better[..., None, None], other.view(torch.uint8), values.view(torch.uint8))
    rows = values.transpose(1, 2).flatten(0, 1).flatten(1)[:size_out, :size_in].contiguous()
    return rows.view(torch.float8_e4m3fn), torch.where(better, power, scale)


# By quantization: the format, and the function that quantizes some rows.
_QUANTIZE: dict[str, tuple[str, Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    "int8": ("scaled", _int8),
    "int4": ("int4", _int4),
    "fp8": ("scaled", _fp8),
    "fp8_blocks": ("blocks", _fp8_blocks),
}


def prepare_rows(x: Tensor, weight: WeightData) -> Rows:
    """The rows (rows, size_in) as products with the weight read them."""
    x = x if x.stride(1) == 1 else x.contiguous()
    if weight.kind not in ("scaled", "blocks"):
        return Rows(x, None)
    values, scales = quantize_rows(x, weight.values.dtype, BLOCK if weight.kind == "blocks" else None)
    return Rows(values, scales)


class GpuWeight:
    """The weight of a linear layer; see `PackedWeight`."""

    def __init__(self, data: WeightData) -> None:
        """data: (size_out, size_in)."""
        self.size_out = len(data.values)
        self.data = data
        self.nbytes = data.nbytes

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
        return matmul(
            rows.values,
            values,
            out,
            kind=kind,
            x_scales=rows.scales,
            scales=scales,
            scale_rows=self.data.scale_rows,
            bias=bias,
            act=act,
        )


class PlainGpuWeight(GpuWeight):
    """A weight that is multiplied in its own dtype, by kernels that sum in the same order for any number of rows."""

    def __init__(self, weight: Tensor) -> None:
        """weight: (size_out, size_in); it is not copied."""
        super().__init__(WeightData("plain", weight, None))

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

    def put(self, expert: int, data: WeightData) -> None:
        """Copy an expert's weight (size_out, size_in) to its place. All experts have the same format."""
        if self._data is None:
            scales = None if data.scales is None else _stacked(data.scales, self.experts)
            self._data = WeightData(data.kind, _stacked(data.values, self.experts), scales)
        self._data.values[expert] = data.values
        if self._data.scales is not None and data.scales is not None:
            self._data.scales[expert] = data.scales


def _stacked(weight: Tensor, experts: int) -> Tensor:
    return torch.empty((experts, *weight.shape), dtype=weight.dtype, device=weight.device)
