"""Schemes of floating-point numbers in compressed-tensors: FP8 with scales, FP4 in groups."""

from __future__ import annotations

from typing import ClassVar

import torch
from typing_extensions import override

from quire.engine.models.checkpoint.formats.compressed_scheme import CompressedScheme, WeightArguments
from quire.engine.models.checkpoint.formats.fp4 import MXFP4_GROUP, NVFP4_GROUP, read_mxfp4, read_nvfp4
from quire.engine.models.checkpoint.formats.fp8 import FP8_DTYPES, Fp8Weight
from quire.engine.models.checkpoint.formats.integer_codes import FLOATS, check_matrix, check_tensor, needed
from quire.engine.models.checkpoint.formats.weight_format import NamedWeight, StoredTensors
from quire.engine.models.errors import UnsupportedModel

_SCALES = (*FLOATS, torch.uint8, torch.float8_e8m0fnu)  # the last two: exponents of 2, as in MXFP8
_FP8_BITS, _FP4_BITS = 8, 4


class FloatQuantized(CompressedScheme):
    """FP8 with scales. How activations were quantized does not matter."""

    def __init__(self, arguments: WeightArguments) -> None:
        super().__init__(arguments)
        _check(arguments, _FP8_BITS, ("tensor", "channel", "group", "block"))

    @override
    def read(self, module: str, stored: StoredTensors) -> NamedWeight:
        name, scales_name = f"{module}.{self.tensor}", f"{module}.weight_scale"
        codes = check_matrix(name, stored[name], *FP8_DTYPES)
        scales = needed(name, scales_name, stored)
        size_out, size_in = codes.shape
        block = self._block()
        shapes = {"tensor": [(), (1,), (1, 1)], "channel": [(size_out, 1), (size_out,)]}.get(self.arguments.strategy)
        if block is not None:
            shapes = [(-(-size_out // block[0]), -(-size_in // block[1]))]
        check_tensor(scales_name, scales, _SCALES, *shapes or ())
        return NamedWeight(name, Fp8Weight(codes, scales, block), (scales_name,))

    def _block(self) -> tuple[int, int] | None:
        group = self.arguments.group
        return self.arguments.block if group is None else (1, group)


class Nvfp4PackQuantized(CompressedScheme):
    """FP4 in groups of 16, with FP8 scales that are divided by a factor."""

    tensor: ClassVar[str] = "weight_packed"

    def __init__(self, arguments: WeightArguments) -> None:
        super().__init__(arguments)
        _check(arguments, _FP4_BITS, ("tensor_group",), NVFP4_GROUP)

    @override
    def read(self, module: str, stored: StoredTensors) -> NamedWeight:
        return read_nvfp4(module, self.tensor, "weight_global_scale", stored, divides=True)


class Mxfp4PackQuantized(CompressedScheme):
    """FP4 in groups of 32, whose scales are powers of two."""

    tensor: ClassVar[str] = "weight_packed"

    def __init__(self, arguments: WeightArguments) -> None:
        super().__init__(arguments)
        _check(arguments, _FP4_BITS, ("group",), MXFP4_GROUP)

    @override
    def read(self, module: str, stored: StoredTensors) -> NamedWeight:
        return read_mxfp4(module, self.tensor, stored)


def _check(arguments: WeightArguments, bits: int, strategies: tuple[str, ...], group: int | None = None) -> None:
    """Check that a scheme has such weights.

    Raises:
        UnsupportedModel: it does not.
    """
    if arguments.bits != bits:
        raise UnsupportedModel(f"num_bits must be {bits} for this format of floats, not {arguments.bits}")
    if arguments.strategy not in strategies:
        raise UnsupportedModel(
            f"strategy {arguments.strategy} is not supported for floats of {bits} bits; supported are "
            f"{', '.join(strategies)}"
        )
    if group is not None and arguments.group != group:
        raise UnsupportedModel(f"group_size must be {group} for this format of floats, not {arguments.group}")
    if not arguments.symmetric or arguments.act_order:
        raise UnsupportedModel("floats with zero points or an order of activations are not supported")
