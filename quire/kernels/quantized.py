"""Rounding of weights to 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels import native
from quire.kernels.grouped_weight import GroupedWeight

GROUP = 64  # inputs of 4-bit weights that share a scale on GPUs
_GROUP_INT4 = 32  # on CPUs, and of 6 bits
_GROUPS_INT8 = (64, 32, 16)  # on CPUs, the first that divides the inputs
_INT4_SPANS = (15, 14, 13, 12, 11, 10)  # codes that a group uses, tried in turn
_OUTPUTS = 256  # quantized at a time, which takes several times their memory


def bits_for(size_in: int, quantization: str) -> int | None:
    """Bits per element of a GPU's weight with `size_in` inputs; None if it is not quantized."""
    if quantization == "int4" and size_in % GROUP == 0:
        return 4
    return 8 if quantization in ("int8", "int4") and size_in % native.LANES == 0 else None


def quantize_groups(weight: Tensor, quantization: str) -> GroupedWeight | None:
    """A CPU's weight (size_out, size_in) in groups; None if its size or `quantization` does not allow that.

    `quantization`: "int8", "int6", "int4" or another.
    """
    size_in = weight.shape[1]
    quantize: Callable[[Tensor], GroupedWeight] = _to_int8_groups
    group = next((group for group in _GROUPS_INT8 if size_in % group == 0), None)
    if quantization in _QUANTIZE and size_in % _GROUP_INT4 == 0:
        quantize, group = _QUANTIZE[quantization], _GROUP_INT4
    if group is None or quantization not in ("int8", *_QUANTIZE):
        return None
    parts = [quantize(part.float().unflatten(1, (-1, group))) for part in weight.split(_OUTPUTS)]
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return GroupedWeight(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minimums) if minimums else None,
        six_bits=parts[0].six_bits,
    )


def _to_int8_groups(groups: Tensor) -> GroupedWeight:
    """groups: (outputs, groups, inputs) float32. The largest magnitude of a group is 127."""
    scales = groups.abs().amax(2, keepdim=True) / 127
    return GroupedWeight((groups / _nonzero(scales)).round().to(torch.int8).flatten(1), scales[..., 0])


def _to_int6_groups(groups: Tensor) -> GroupedWeight:
    """groups: (outputs, groups, inputs) float32. The element of the largest magnitude is -32 or 31.

    Of both, each with the scale of the least squared error, the better is taken for each group.
    """
    extremes = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    best = torch.full_like(extremes, torch.inf)
    scales, codes = torch.zeros_like(extremes), torch.zeros_like(groups)
    for largest in (-32, 31):
        tried = (groups * (largest / _nonzero(extremes))).round_().clamp_(-32, 31)
        scale = (tried * groups).sum(2, keepdim=True) / _nonzero(tried.square().sum(2, keepdim=True))
        error = (tried * scale).sub_(groups).square_().sum(2, keepdim=True)
        better = error < best
        for value, new in ((best, error), (scales, scale), (codes, tried)):
            torch.where(better, new, value, out=value)
    return GroupedWeight(codes.to(torch.int8).flatten(1), scales[..., 0], six_bits=True)


def _to_int4_groups(groups: Tensor) -> GroupedWeight:
    """groups: (outputs, groups, inputs) float32.

    Of several spans of the codes, each with the scale and the minimum of the least squared error, the best is taken for
    each group. Of weights that lie on a grid of 4 bits the grid is found again.
    """
    low, high = groups.aminmax(dim=2, keepdim=True)
    means = groups.mean(2, keepdim=True)
    centered = groups - means
    best = torch.full_like(low, torch.inf)
    scales, minimums = torch.zeros_like(low), means.clone()
    codes = torch.zeros_like(groups)
    for span in _INT4_SPANS:
        tried = ((groups - low) * (span / _nonzero(high - low))).round_()
        mean = tried.mean(2, keepdim=True)
        tried_centered = tried - mean
        scale = (tried_centered * centered).sum(2, keepdim=True)
        scale /= _nonzero(tried_centered.square().sum(2, keepdim=True))
        minimum = means - scale * mean
        error = (tried * scale).add_(minimum - groups).square_().sum(2, keepdim=True)
        better = error < best
        for value, new in ((best, error), (scales, scale), (minimums, minimum), (codes, tried)):
            torch.where(better, new, value, out=value)
    packed = codes.to(torch.uint8).flatten(1)
    return GroupedWeight(packed[:, 0::2] | packed[:, 1::2] << 4, scales[..., 0], minimums[..., 0])


_QUANTIZE = {"int6": _to_int6_groups, "int4": _to_int4_groups}  # by quantization, in groups of _GROUP_INT4


def to_8_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of a weight (outputs, inputs) float32: (outputs, inputs) int8, and scales (outputs, 1)."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / _nonzero(scale)).round().to(torch.int8), scale


def to_4_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of a weight (outputs, inputs) float32 from -8 to 7.

    The element with the largest magnitude of a group is -8, as in llama.cpp's Q4_0.

    Returns:
        (outputs, groups, GROUP) float32, and scales (outputs, groups).
    """
    groups = weight.unflatten(1, (-1, GROUP))
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = extreme / -8
    return (groups / _nonzero(scale)).round().clamp(-8, 7), scale[..., 0]


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)
