"""Weights of FP4 in groups of inputs, as NVFP4 and MXFP4 store them: two codes per byte, and scales of 8 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.engine.models.checkpoint.formats.integer_codes import FLOATS, check_matrix, check_tensor, needed
from quire.engine.models.checkpoint.formats.stored_groups import named_groups
from quire.engine.models.checkpoint.formats.weight_format import NamedWeight, StoredTensors, groups_of
from quire.engine.models.errors import BrokenFolder
from quire.kernels.grouped_weight import GroupedWeight

NVFP4_GROUP, MXFP4_GROUP = 16, 32  # inputs that share a scale
# The values of FP4 (one sign, two exponent, one mantissa bit) in the order of their codes, OCP MX v1.0.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def fp4_values() -> Tensor:
    """The values of the 16 codes: (16,) float32."""
    return torch.tensor(_FP4)


def powers_of_two(exponents: Tensor) -> Tensor:
    """What scales of 8 exponent bits (E8M0, or their bytes) stand for, as float32."""
    return exponents.view(torch.float8_e8m0fnu).float()


def read_nvfp4(module: str, tensor: str, factor: str, stored: StoredTensors, *, divides: bool) -> NamedWeight:
    """A weight whose scales are FP8 and share a factor.

    Args:
        module: name of the weight's module.
        tensor, factor: what the module calls its codes, and the factor.
        stored: all tensors.
        divides: whether scales are divided by the factor.

    Raises:
        BrokenFolder: a tensor is missing, or its dtype or shape does not fit.
    """
    first, name = f"{module}.{tensor}", f"{module}.{factor}"
    of_all = needed(first, name, stored)
    check_tensor(name, of_all, FLOATS, (), (1,))
    number = of_all.float().reshape(())

    def scales_of(scales: Tensor) -> Tensor:
        return scales.float() / number if divides else scales.float() * number

    return _read(module, tensor, stored, NVFP4_GROUP, (torch.float8_e4m3fn,), scales_of, name)


def read_mxfp4(module: str, tensor: str, stored: StoredTensors) -> NamedWeight:
    """A weight whose scales are powers of two; see `read_nvfp4`.

    Raises:
        BrokenFolder: a tensor is missing, or its dtype or shape does not fit.
    """
    return _read(module, tensor, stored, MXFP4_GROUP, (torch.uint8, torch.float8_e8m0fnu), powers_of_two)


def _read(
    module: str,
    tensor: str,
    stored: StoredTensors,
    group: int,
    scale_dtypes: tuple[torch.dtype, ...],
    scales_of: Callable[[Tensor], Tensor],
    *others: str,
) -> NamedWeight:
    first, scales_name = f"{module}.{tensor}", f"{module}.weight_scale"
    codes = check_matrix(first, stored[first], torch.uint8)
    size_out, size_in = len(codes), 2 * codes.shape[1]
    if size_in % group:
        raise BrokenFolder(f"{first} has {size_in} inputs, which groups of {group} do not divide")
    scales = needed(first, scales_name, stored)
    check_tensor(scales_name, scales, scale_dtypes, (size_out, size_in // group))

    def read(rows: slice, columns: slice) -> GroupedWeight:
        return fp4_groups(codes, scales, group, scales_of, rows, columns)

    return named_groups(module, (size_out, size_in), read, stored, [first, scales_name, *others])


def fp4_groups(
    codes: Tensor,
    scales: Tensor,
    group: int,
    scales_of: Callable[[Tensor], Tensor],
    rows: slice,
    columns: slice,
) -> GroupedWeight:
    """A part of a weight.

    Args:
        codes: (size_out, size_in / 2), the lower half of a byte first.
        scales: (size_out, groups).
        group: inputs that share a scale.
        scales_of: gives what scales stand for.
        rows, columns: the part.

    Raises:
        UnsupportedModel: a border is inside of a group.
    """
    size_in = 2 * codes.shape[1]
    groups = groups_of(columns, group, size_in)
    begin, end, _ = columns.indices(size_in)
    part = codes[rows, begin // 2 : end // 2]
    return GroupedWeight(part.contiguous(), scales_of(scales[rows, groups]).contiguous(), table=fp4_values())
