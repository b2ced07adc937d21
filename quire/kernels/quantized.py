"""Linear layers with weights of 8 or 4 bits. Inputs are quantized to 8 bits row by row, so products are of integers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import native
from quire.kernels.capture import empty
from quire.kernels.panels import PANEL, pack_panels

GROUP = 64  # inputs of 4-bit weights that share a scale
_OUTPUTS = 32 * PANEL  # quantized at a time, which takes several times their memory


def bits_for(size_in: int, quantization: str) -> int | None:
    """Bits per element of a weight with `size_in` inputs; None if it is not quantized."""
    if quantization == "int4" and size_in % GROUP == 0:
        return 4
    return 8 if quantization in ("int8", "int4") and size_in % native.LANES == 0 else None


class PackedInteger:
    """A weight of 8 or 4 bits in the format of ``csrc/ops/quantized_linear.h``."""

    def __init__(self, weight: Tensor, bits: int) -> None:
        """Quantize a weight (size_out, size_in)."""
        self.size_out = len(weight)
        self._bits = bits
        parts = [_QUANTIZE[bits](part.float()) for part in weight.split(_OUTPUTS)]
        self._data, scales, corrections = (torch.cat(part) for part in zip(*parts, strict=True))
        self._scales, self._corrections = scales.T.contiguous(), corrections
        self.nbytes = self._data.nbytes + self._scales.nbytes + self._corrections.nbytes

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
        x = x if x.stride(1) == 1 else x.contiguous()
        if out is None:
            out = empty((len(x), self.size_out), out_dtype or x.dtype)
        native.kernels.quantized_linear(
            x=x,
            weight=self._data,
            scales=self._scales,
            corrections=self._corrections,
            bias=bias,
            out=out,
            bits=self._bits,
            act=act,
        )
        return out


_Quantized = tuple[Tensor, Tensor, Tensor]  # panels, scales (outputs, groups), corrections (outputs,)


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


def _quantize_to_8_bits(weight: Tensor) -> _Quantized:
    integers, scale = to_8_bits(weight)
    corrections = 128 * integers.sum(1, keepdim=True) * scale
    return pack_panels(integers.view(torch.int32)), _padded(scale), _padded(corrections)[:, 0]


def _quantize_to_4_bits(weight: Tensor) -> _Quantized:
    integers, scale = to_4_bits(weight)
    corrections = (128 * integers.sum(2) * scale).sum(1, keepdim=True)
    low, high = (integers + 8).to(torch.uint8).flatten(1).unflatten(1, (-1, 2, 4)).unbind(2)
    words = (low | high << 4).flatten(1).view(torch.int32)
    return pack_panels(words), _padded(scale), _padded(corrections)[:, 0]


_QUANTIZE: dict[int, Callable[[Tensor], _Quantized]] = {8: _quantize_to_8_bits, 4: _quantize_to_4_bits}


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)


def _padded(rows: Tensor) -> Tensor:
    """Rows with zeros appended up to a whole panel."""
    return F.pad(rows, (0, 0, 0, -len(rows) % PANEL))
