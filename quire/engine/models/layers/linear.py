"""Linear layers. Projections of the same input lie in one weight, side by side."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels.linear import PackedWeight, Quantization, pack_weight


class Packable(nn.Module, ABC):
    """A layer whose weights may take another form once they are all known."""

    @abstractmethod
    def pack_weights(self, quantization: Quantization) -> None:
        """Take the form that is fastest here, rounded as far as is asked for."""

    @property
    @abstractmethod
    def packed_bytes(self) -> int:
        """Bytes of the weights that are no parameters any more."""


class Linear(Packable):
    """y = x W^T + b, where the rows of W are the outputs of one or more projections.

    Attributes:
        parts: rows of each projection, in order.
        panels: the weight in another form; `weight` is none then.
    """

    def __init__(self, size_in: int, *parts: int, bias: bool = False, plain: bool = False) -> None:
        """`plain`: somebody else reads the weight, so it stays as it is."""
        super().__init__()
        self.parts = parts
        self.plain = plain
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(sum(parts), size_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(parts)), requires_grad=False) if bias else None
        self.panels: PackedWeight | None = None

    def pack_weights(self, quantization: Quantization) -> None:
        """See `Packable`."""
        if self.plain or self.weight is None:
            return
        self.panels = pack_weight(self.weight, quantization)
        if self.panels is not None:
            self.weight = None
            if self.bias is not None:
                self.bias.data = self.bias.data.float()

    @property
    def packed_bytes(self) -> int:
        """See `Packable`."""
        return 0 if self.panels is None else self.panels.nbytes

    def forward(self, x: Tensor, *, wide: bool = False, out: Tensor | None = None) -> Tensor:
        """(tokens, size_in) to (tokens, sum(parts)), in float32 if `wide`; written to `out` if that is given."""
        if self.panels is not None:
            return self.panels(x, self.bias, out_dtype=torch.float32 if wide else None, out=out)
        assert self.weight is not None
        made = F.linear(x, self.weight, self.bias)
        made = made.float() if wide else made
        return made if out is None else out.copy_(made)
