"""Linear layers, with projections of the same input fused into one weight."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.models.layers.inputs import AdaptedRows
from quire.kernels import gpu, native
from quire.kernels.activation import activation, kernel_activation
from quire.kernels.add_scaled import add_scaled
from quire.kernels.linear import PackedWeight, Quantization, pack_weight
from quire.kernels.low_rank import SortedRows, add_low_rank
from quire.kernels.take_rows import take_rows


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
        size_in: inputs.
        parts: rows of each projection, in order.
        plain: other code reads `weight`, so it is never packed.
        packed: the packed weight; `weight` is then None.
        adapter: adapter whose result is added for some rows; None for most layers.
    """

    def __init__(self, size_in: int, *parts: int, bias: bool = False) -> None:
        super().__init__()
        self.size_in = size_in
        self.parts = parts
        self.plain = False
        self.weight = nn.Parameter(torch.empty(sum(parts), size_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(parts)), requires_grad=False) if bias else None
        self.packed: PackedWeight | None = None
        self.adapter: LowRank | None = None

    def pack_weights(self, quantization: Quantization) -> None:
        if not self.plain and self.weight is not None:
            self._use(pack_weight(self.weight, quantization))

    def _use(self, packed: PackedWeight | None) -> None:
        """Replace the weight by a packed one; None: keep it."""
        self.packed = packed
        if packed is not None:
            self.weight = None
            if self.bias is not None:  # it may be loaded later, in float32 then
                self.bias.data = self.bias.data.float()

    @property
    def packed_bytes(self) -> int:
        return 0 if self.packed is None else self.packed.nbytes

    def adapt(self, down: Tensor, up: Tensor) -> None:
        """Add a low-rank product for the rows that are adapted. down: (rank, size_in); up: (sum(parts), rank)."""
        self.adapter = LowRank(down, up)

    def forward(
        self,
        x: Tensor,
        *,
        act: str | None = None,
        adapted: AdaptedRows | None = None,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """(tokens, size_in) to (tokens, sum(parts)).

        Args:
            x: the input.
            act: activation of the result; None: none. Not with `out`.
            adapted: rows that the adapter applies to; None: none. Not with `out_dtype` and `out`.
            out_dtype: see `PackedWeight`.
            out: see `PackedWeight`.
        """
        if adapted is not None and self.adapter is not None:
            return _activated(self.adapter.add(self(x), x, adapted), act)
        if self.packed is not None:
            name = None if act is None else kernel_activation(act, sum(self.parts))
            y = self.packed(x, self.bias, act=name, out_dtype=out_dtype, out=out)
            return _activated(y, act) if name is None else y
        assert self.weight is not None
        y = _activated(F.linear(x, self.weight, self.bias), act)
        y = y if out_dtype is None else y.to(out_dtype)
        return y if out is None else out.copy_(y)


def _activated(y: Tensor, act: str | None) -> Tensor:
    """act(y); it may overwrite y."""
    return y if act is None else activation(y, act, in_place=True)


class LowRank(nn.Module):
    """A product of two small weights that is added to the result of a linear layer (LoRA, Hu et al. 2021)."""

    def __init__(self, down: Tensor, up: Tensor) -> None:
        """down: (rank, size_in); up: (size_out, rank), times the adapter's scale."""
        super().__init__()
        self.down, self.up = (Linear(weight.shape[1], weight.shape[0]) for weight in (down, up))
        for linear, weight in ((self.down, down), (self.up, up)):
            linear.weight = nn.Parameter(weight, requires_grad=False)
            linear.plain = not native.supports(weight) and gpu.supports(weight)  # `add_low_rank` reads it
            linear.pack_weights("none")

    def add(self, y: Tensor, x: Tensor, rows: AdaptedRows) -> Tensor:
        """y (tokens, size_out), of which some rows get x's product; it may be changed. x: (tokens, size_in)."""
        if isinstance(rows, SortedRows):
            assert self.down.weight is not None
            assert self.up.weight is not None
            return add_low_rank(y, x, self.down.weight[None], self.up.weight[None], rows)
        if rows.indices is None:
            return add_scaled(y, self.up(self.down(x)))
        own = add_scaled(take_rows(y, rows.indices), self.up(self.down(take_rows(x, rows.indices))))
        return y.index_copy_(0, rows.indices, own)
