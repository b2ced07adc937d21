"""Products of the rows of each head with the head's own weight."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import gpu, native
from quire.kernels.capture import empty
from quire.kernels.huge_pages import empty_in_huge_pages
from quire.kernels.panels import PANEL, write_panels


class HeadWeight(Protocol):
    """A weight (heads, size_out, size_in) in the format of some kernel.

    The product with a row has the same bits however many rows there are.
    """

    nbytes: int

    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """x W^T of each head.

        Args:
            x: (tokens, heads, size_in) of the weight's dtype.
            out: (tokens, heads, size_out), last stride 1, written to if given.

        Returns:
            (tokens, heads, size_out)
        """


class PackedHeadWeight:
    """For the compiled kernels: (heads, panels, words, 32) of words of one float32 or two bfloat16 elements."""

    def __init__(self, weight: Tensor) -> None:
        """weight: (heads, size_out, size_in) float32 or bfloat16; it is copied."""
        self._heads, self._size_out, size_in = weight.shape
        padding = -size_in % (torch.int32.itemsize // weight.itemsize)
        words = F.pad(weight, (0, padding)).contiguous().view(torch.int32)
        panels = -(-self._size_out // PANEL)
        self._data = empty_in_huge_pages((self._heads, panels, words.shape[2], PANEL), torch.int32)
        for head, head_panels in zip(words, self._data, strict=True):
            write_panels(head, head_panels)
        self.nbytes = self._data.nbytes

    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """x W^T of each head; see `HeadWeight`."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        if out is None:
            out = empty((len(x), self._heads, self._size_out), x.dtype)
        native.kernels.head_linear(x=x, weight=self._data, out=out)
        return out


class GpuHeadWeight:
    """For the Triton kernel: the plain weight."""

    def __init__(self, weight: Tensor) -> None:
        """weight: (heads, size_out, size_in); it is copied unless it is contiguous."""
        self._weight = weight.contiguous()
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """x W^T of each head; see `HeadWeight`."""
        from quire.kernels.triton.head_linear import head_linear

        x = x if x.stride(-1) == 1 else x.contiguous()
        if out is None:
            out = x.new_empty((*x.shape[:2], self._weight.shape[1]))
        return head_linear(x, self._weight, out)


def pack_head_weight(weight: Tensor) -> HeadWeight | None:
    """The weight (heads, size_out, size_in) in the format for its device; None if there is no kernel: see `reference`.

    No format quantizes it.
    """
    dense = weight if weight.stride(-1) == 1 else weight.contiguous()
    if native.supports(dense):
        return PackedHeadWeight(dense)
    return GpuHeadWeight(dense) if gpu.supports(dense) else None


def reference(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`HeadWeight` in torch, whose sums may depend on the number of rows. weight: (heads, size_out, size_in)."""
    product = torch.einsum("thi,hoi->tho", x, weight)
    return product if out is None else out.copy_(product)
