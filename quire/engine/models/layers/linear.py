"""Linear layers, with projections of the same input fused into one weight."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels.activation import activation, kernel_activation
from quire.kernels.linear import PackedWeight, Quantization, pack_weight


class Packable(nn.Module, ABC):
    """A layer whose weight can be packed for the compiled kernels once it is loaded.

    Attributes:
        weight: None once it is packed.
    """

    weight: nn.Parameter | None

    @abstractmethod
    def pack_weights(self, quantization: Quantization) -> None:
        """Replace complete parameters by packed weights, quantized if asked for, where the kernels support it."""

    @property
    @abstractmethod
    def packed_bytes(self) -> int:
        """Bytes of the packed weights, which are not parameters any more."""


class Linear(Packable):
    """y = x W^T + b, where the rows of W are the outputs of one or more projections.

    Attributes:
        parts: rows of each projection, in order.
        packed: the packed weight; `weight` is then None.
    """

    def __init__(self, size_in: int, *parts: int, bias: bool = False, plain: bool = False) -> None:
        """`plain`: other code reads `weight`, so it is never packed."""
        super().__init__()
        self.parts = parts
        self.plain = plain
        self.weight = nn.Parameter(torch.empty(sum(parts), size_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(parts)), requires_grad=False) if bias else None
        self.packed: PackedWeight | None = None

    def pack_weights(self, quantization: Quantization) -> None:
        if self.plain or self.weight is None:
            return
        self.packed = pack_weight(self.weight, quantization)
        if self.packed is not None:
            self.weight = None
            if self.bias is not None:  # it may be loaded later, in float32 then
                self.bias.data = self.bias.data.float()

    @property
    def packed_bytes(self) -> int:
        return 0 if self.packed is None else self.packed.nbytes

    def forward(
        self,
        x: Tensor,
        *,
        act: str | None = None,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """(tokens, size_in) to (tokens, sum(parts)), then the activation `act`; see `PackedWeight` for the others."""
        if self.packed is not None:
            fused = kernel_activation(act, sum(self.parts))
            y = self.packed(x, self.bias, act=fused, out_dtype=out_dtype, out=out)
            return y if act is None or fused is not None else activation(y, act, in_place=True)
        assert self.weight is not None
        y = F.linear(x, self.weight, self.bias)
        y = y if act is None else activation(y, act, in_place=True)
        y = y if out_dtype is None else y.to(out_dtype)
        return y if out is None else out.copy_(y)
