"""Linear layers whose weights lie in panels of 32 outputs, as the compiled kernels read them."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from quire.kernels import native
from quire.kernels.panels import in_panels, take_panel_rows
from quire.kernels.quantized import PackedInteger, bits_for
from quire.kernels.capture import empty

Quantization = Literal["none", "int8", "int4"]


class PackedWeight(Protocol):
    """A weight (size_out, size_in) in the form of some kernel."""

    nbytes: int

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """x W^T + b.

        Args:
            x: (rows, size_in).
            bias: (size_out,) float32.
            float32_out: give float32 instead of x's type.
            out: (rows, size_out) of that type, where it is to be written.

        Returns:
            (rows, size_out)
        """


class PackedBFloat16:
    """(panels, size_in / 2, 32, 2): one load brings two inputs' weights for 16 outputs."""

    def __init__(self, weight: Tensor) -> None:
        self.size_out = len(weight)
        self._data = in_panels(weight.view(torch.int32))
        self.nbytes = self._data.nbytes

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """See `PackedWeight`."""
        x = x if x.stride(1) == 1 else x.contiguous()
        rows, size_in = x.shape
        if out is None:
            out = empty((rows, self.size_out), torch.float32 if float32_out else torch.bfloat16)
        native.kernels.linear(
            x.data_ptr(), self._data.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
            rows, size_in, self.size_out, x.stride(0), int(float32_out),
        )  # fmt: skip
        return out

    def rows(self, indices: Tensor) -> Tensor:
        """Some rows of the weight: (n, size_in)."""
        return take_panel_rows(self._data, indices, torch.bfloat16)


def pack_weight(weight: Tensor, quantization: Quantization) -> PackedWeight | None:
    """The weight in the form that is fastest here; none where that is the plain one.

    Args:
        weight: (size_out, size_in).
        quantization: how far it may be rounded.
    """
    if not native.supports(weight):
        return None
    bits = bits_for(weight.shape[1], quantization)
    if bits is not None:
        return PackedInteger(weight, bits)
    if weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0:
        return PackedBFloat16(weight)
    return None
