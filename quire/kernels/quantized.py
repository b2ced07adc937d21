"""Linear layers with weights of 8 or 4 bits; inputs are rounded to 8 bits row by row, so products are of integers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import native
from quire.kernels.panels import PANEL, in_panels
from quire.kernels.capture import empty

GROUP = 64  # inputs that share a scale, of 4-bit weights
_OUTPUTS = 32 * PANEL  # rounded at a time, as that takes several times their size


def bits_for(size_in: int, quantization: str) -> int | None:
    """Bits of a weight with so many inputs; none if it stays as it is."""
    if quantization == "int4" and size_in % GROUP == 0:
        return 4
    return 8 if quantization != "none" and size_in % native.LANES == 0 else None


class PackedInteger:
    """See ``csrc/quantized.h`` for how the weights lie."""

    def __init__(self, weight: Tensor, bits: int) -> None:
        """Round a weight (size_out, size_in)."""
        self.size_out = len(weight)
        self._bits = bits
        parts = [_ROUND[bits](part.float()) for part in weight.split(_OUTPUTS)]
        self._data, scales, corrections = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        self._scales, self._corrections = scales.T.contiguous(), corrections
        self.nbytes = self._data.nbytes + self._scales.nbytes + self._corrections.nbytes

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """See `PackedWeight`."""
        x = x if x.stride(1) == 1 else x.contiguous()
        rows, size_in = x.shape
        if out is None:
            out = empty((rows, self.size_out), torch.float32 if float32_out else x.dtype)
        native.kernels.quantized_linear(
            native.CODES[x.dtype], x.data_ptr(), self._data.data_ptr(), self._scales.data_ptr(),
            self._corrections.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
            rows, size_in, self.size_out, x.stride(0), self._bits, int(float32_out),
        )  # fmt: skip
        return out


Rounded = tuple[Tensor, Tensor, Tensor]  # panels, scales (outputs, groups), corrections (outputs,)


def _round_to_8_bits(weight: Tensor) -> Rounded:
    scale = weight.abs().amax(1, keepdim=True) / 127
    whole = (weight / _not_zero(scale)).round().to(torch.int8)
    corrections = 128 * whole.sum(1, keepdim=True) * scale
    return in_panels(whole.view(torch.int32)), _filled(scale), _filled(corrections)[:, 0]


def _round_to_4_bits(weight: Tensor) -> Rounded:
    """From -8 to 7, the number farthest from 0 being -8, as llama.cpp's Q4_0 does it."""
    groups = weight.unflatten(1, (-1, GROUP))
    farthest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = farthest / -8
    whole = (groups / _not_zero(scale)).round().clamp(-8, 7)
    corrections = (128 * whole.sum(2) * scale[..., 0]).sum(1, keepdim=True)
    near, far = (whole + 8).to(torch.uint8).flatten(1).unflatten(1, (-1, 2, 4)).unbind(2)
    words = (near | far << 4).flatten(1).view(torch.int32)
    return in_panels(words), _filled(scale[..., 0]), _filled(corrections)[:, 0]


_ROUND: dict[int, Callable[[Tensor], Rounded]] = {8: _round_to_8_bits, 4: _round_to_4_bits}


def _not_zero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)


def _filled(rows: Tensor) -> Tensor:
    """With zeros up to a whole panel."""
    return F.pad(rows, (0, 0, 0, -len(rows) % PANEL))
