"""Weights in the formats of the Triton kernels: of one linear layer, or of a layer's experts in one tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.grouped_weight import same_tensors
from quire.kernels.groups import Groups
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
        values: (..., size_out, size_in), or (..., size_out, bytes), or for "groups" as `quire.kernels.triton.groups`
            has them.
        scales: float32 (..., size_out), or (..., size_out, groups), or (..., blocks of outputs, blocks of inputs); for
            "groups" float16 (..., groups, size_out); None for the format "plain".
        groups: for the format "groups".
    """

    kind: str
    values: Tensor
    scales: Tensor | None
    groups: Groups | None = None

    @property
    def scale_rows(self) -> int:
        """Outputs that share a scale."""
        return BLOCK if self.kind == "blocks" else 1

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(part.nbytes for part in (self.values, self.scales, self.groups) if part is not None)

    @property
    def size_out(self) -> int:
        """Outputs of the weight, or of each."""
        return self.values.shape[-2] if self.groups is None else self.groups.size_out


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
    if weight.groups is not None and weight.groups.order is not None:
        x = x.index_select(1, weight.groups.order)
    x = x if x.stride(1) == 1 else x.contiguous()
    if weight.kind not in ("scaled", "blocks"):
        return Rows(x, None)
    values, scales = quantize_rows(x, weight.values.dtype, BLOCK if weight.kind == "blocks" else None)
    return Rows(values, scales)


class GpuWeight:
    """The weight of a linear layer; see `PackedWeight`."""

    def __init__(self, data: WeightData) -> None:
        """data: (size_out, size_in)."""
        self.size_out = data.size_out
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
        data = self.data
        return matmul(
            rows.values,
            data.values,
            out,
            kind=data.kind,
            x_scales=rows.scales,
            scales=data.scales,
            scale_rows=data.scale_rows,
            groups=data.groups,
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
        return take_weight_rows(self.data, indices)


class StackedWeights:
    """The weights of one projection of all experts, in one tensor that is filled expert by expert."""

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self._data: WeightData | None = None

    @property
    def nbytes_per_expert(self) -> int:
        """Bytes of an expert's weight."""
        return 0 if self._data is None else self._data.nbytes // self.experts

    @property
    def is_used(self) -> bool:
        """Whether weights were put here."""
        return self._data is not None

    @property
    def data(self) -> WeightData:
        """The weights, with the experts as first dimension."""
        assert self._data is not None
        return self._data

    def accepts(self, data: WeightData) -> bool:
        """Whether an expert's weight can be put beside those that are here."""
        kinds = {data.kind} if self._data is None else {data.kind, self._data.kind}
        return len(kinds) == 1 or kinds == {"plain", "groups"}

    def put(self, expert: int, data: WeightData) -> None:
        """Copy an expert's weight (size_out, size_in) to its place.

        All experts have the same format: if one has minimums, or is plain, others become that.
        """
        if self._data is None:
            self._data = _mapped(data, lambda tensor: tensor.new_empty((self.experts, *tensor.shape)))
        elif not _alike(self._data, data):
            data = self._agreed(self._data, data)
        for into, tensor in zip(_tensors(self._data), _tensors(data), strict=True):
            into[expert] = tensor

    def _agreed(self, stack: WeightData, data: WeightData) -> WeightData:
        """An expert's weight in a format that the others have from now on, too."""
        if _alike(stack, data, with_minimums=True):
            self._data = _with_minimums(stack)
            return _with_minimums(data)
        if stack.groups is not None:
            shape = self.experts, stack.groups.size_out, stack.groups.size_in
            whole = torch.empty(shape, dtype=stack.groups.dtype, device=stack.values.device)
            for index, into in enumerate(whole):
                into.copy_(_plain(_mapped(stack, itemgetter(index))))
            self._data = WeightData("plain", whole, None)
        return WeightData("plain", _plain(data), None)


def _tensors(data: WeightData) -> list[Tensor]:
    """Those that each expert has of its own."""
    groups = () if data.groups is None else (data.groups.minimums, data.groups.factors)
    return [tensor for tensor in (data.values, data.scales, *groups) if tensor is not None]


def _mapped(data: WeightData, function: Callable[[Tensor], Tensor]) -> WeightData:
    """Data whose `_tensors` are what a function makes of them."""
    scales = None if data.scales is None else function(data.scales)
    groups = data.groups
    if groups is not None:
        minimums = None if groups.minimums is None else function(groups.minimums)
        groups = replace(groups, minimums=minimums, named_factors={groups.layout: function(groups.factors)})
    return WeightData(data.kind, function(data.values), scales, groups)


def _alike(first: WeightData, second: WeightData, *, with_minimums: bool = False) -> bool:
    """Whether data differ in numbers alone, or would if both had minimums."""
    if first.groups is None or second.groups is None:
        return first.kind == second.kind
    return (
        (first.groups.codes, first.groups.group) == (second.groups.codes, second.groups.group)
        and same_tensors(first.groups.table, second.groups.table)
        and (with_minimums or first.groups.layout == second.groups.layout)
    )


def _with_minimums(data: WeightData) -> WeightData:
    """Data in groups where no code stands for 0."""
    groups, scales = data.groups, data.scales
    assert groups is not None
    assert scales is not None
    if groups.minimums is not None:
        return data
    power = 2.0 ** abs(groups.zero).bit_length()  # minimums are larger than scales, and float16 ends at 2^16
    scales = scales / power
    with_minimums = replace(groups, zero=0, minimums=scales * -groups.zero)
    named_factors = {with_minimums.layout: groups.factors * power}
    return WeightData(data.kind, data.values, scales, replace(with_minimums, named_factors=named_factors))


def _plain(data: WeightData) -> Tensor:
    """What plain weights or weights in groups stand for: (size_out, size_in)."""
    if data.groups is None:
        return data.values
    return take_weight_rows(data, torch.arange(data.groups.size_out, device=data.values.device))


def take_weight_rows(data: WeightData, indices: Tensor) -> Tensor:
    """Rows of a plain weight, or of one in groups, by their indices: (n, size_in)."""
    if data.groups is None:
        return take_rows(data.values, indices)
    from quire.kernels.triton.groups import group_rows

    assert data.scales is not None
    out = torch.empty((len(indices), data.groups.size_in), dtype=data.groups.dtype, device=indices.device)
    group_rows(data.values, data.scales, data.groups, indices, out)
    return out if data.groups.order is None else torch.empty_like(out).index_copy_(1, data.groups.order, out)
