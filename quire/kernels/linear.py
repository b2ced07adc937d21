"""Linear layers with packed weights: in panels of 32 outputs as the compiled kernels read them, or as GPUs do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from quire.kernels import gpu, native
from quire.kernels.capture import empty
from quire.kernels.gpu_weights import GpuWeight, PlainGpuWeight, format_weight
from quire.kernels.packed_groups import PackedGroups
from quire.kernels.panels import pack_panels, take_panel_rows
from quire.kernels.quantized import quantize_groups
from quire.kernels.saved_weight import SavedWeight

# "fp8_blocks": float8 in blocks, for checkpoints that have such weights
Quantization = Literal["none", "int8", "int4", "fp8", "fp8_blocks"]


class PackedWeight(Protocol):
    """A weight (size_out, size_in) in the format of some kernel."""

    nbytes: int

    def __call__(
        self,
        x: Tensor,
        bias: Tensor | None,
        *,
        act: str | None = None,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """act(x W^T + b).

        Args:
            x: (rows, size_in).
            bias: (size_out,) float32.
            act: a name from `kernel_activation`; None for no activation.
            out_dtype: of the result: float32 or x's dtype, which is the default.
            out: (rows, size_out), written to if given; `out_dtype` is ignored then. On CPUs with quantized weights its
                rows may have a stride.

        Returns:
            (rows, size_out)
        """


@runtime_checkable
class PackedTable(PackedWeight, Protocol):
    """A weight whose rows can be read, so that it serves as a table of embeddings, too."""

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight by their indices: (n, size_in)."""


class PackedBFloat16:
    """(panels, size_in / 2, 32, 2): one load brings the weights of two inputs for 16 outputs."""

    def __init__(self, weight: Tensor) -> None:
        self._set(len(weight), pack_panels(weight.view(torch.int32)))

    def saved(self) -> SavedWeight:
        """The weight as tensors and facts; `restored` makes it of them."""
        return SavedWeight("bfloat16", {"size_out": self.size_out}, {"data": self._data})

    @classmethod
    def restored(cls, saved: SavedWeight) -> Self:
        """The weight that was `saved`. Its tensors are used as they are, and not checked."""
        weight = cls.__new__(cls)
        weight._set(saved.facts["size_out"], saved.tensors["data"])
        return weight

    def _set(self, size_out: int, data: Tensor) -> None:
        self.size_out, self.size_in = size_out, 2 * data.shape[1]
        self._data = data
        self.nbytes = data.nbytes

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
            out = empty((len(x), self.size_out), out_dtype or torch.bfloat16)
        native.kernels.linear(x=x, weight=self._data, bias=bias, out=out, act=act)
        return out

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight by their indices: (n, size_in)."""
        return take_panel_rows(self._data, indices, torch.bfloat16)


SavableWeight = PackedGroups | PackedBFloat16  # whose tensors are known, so that they can be written to a file
SAVED_KINDS: Mapping[str, type[SavableWeight]] = {"groups": PackedGroups, "bfloat16": PackedBFloat16}
ExactWeight = PackedBFloat16 | PlainGpuWeight  # formats that lose nothing, whose rows can be read


def pack_weight(weight: Tensor, quantization: Quantization, *, six_bit_rows: int = 0) -> PackedWeight | None:
    """The weight in the fastest format for its device; None if that is the plain tensor.

    Args:
        weight: (size_out, size_in).
        quantization: the lowest precision that is accepted.
        six_bit_rows: rows at the end that get 6 bits instead of 4 on CPUs.
    """
    if native.supports(weight):
        return _packed_for_cpu(weight, quantization, six_bit_rows)
    if not gpu.supports(weight) or (quantization == "none" and weight.dtype == torch.float32):
        return None  # torch multiplies float32, whose exact products have no tensor cores; its last bits may differ
    return PlainGpuWeight(weight) if quantization == "none" else GpuWeight(format_weight(weight, quantization))


def pack_exact_weight(weight: Tensor) -> PackedWeight | None:
    """The weight in a format that loses nothing, whose product with a row does not depend on how many rows there are.

    None if that is the plain tensor.
    """
    if native.supports(weight):
        return _packed_for_cpu(weight, "none")
    return PlainGpuWeight(weight) if gpu.supports(weight) else None


def _packed_for_cpu(weight: Tensor, quantization: Quantization, six_bit_rows: int = 0) -> PackedWeight | None:
    parts = [(weight, str(quantization))]
    if quantization == "int4" and six_bit_rows:
        first, last = weight.split([len(weight) - six_bit_rows, six_bit_rows])
        parts = [(first, "int4"), (last, "int6")] if len(first) else [(last, "int6")]
    groups = [quantize_groups(part, bits) for part, bits in parts]
    packable = [part for part in groups if part is not None]
    if packable:
        return PackedGroups(packable, weight.dtype, compact=False)
    if weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0:
        return PackedBFloat16(weight)
    return None
