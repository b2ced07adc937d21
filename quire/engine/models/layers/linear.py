"""Linear layers, with projections of the same input fused into one weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from quire.kernels import gpu
from quire.kernels.activation import activation, kernel_activation
from quire.kernels.add_scaled import add_scaled
from quire.kernels.linear import PackedBFloat16, PackedWeight, Quantization, pack_weight
from quire.kernels.lora import SortedRows, add_lora
from quire.kernels.packed_groups import PackedGroups
from quire.kernels.take_rows import take_rows

# The rows of a linear layer's input that adapters apply to: indices by adapter (None: all rows), or, on GPUs, sorted.
LoRARows = Mapping[int, Tensor | None] | SortedRows


class Packable(nn.Module, ABC):
    """A layer whose weight can be packed for the compiled kernels once it is loaded.

    Attributes:
        is_exact: the weight is never quantized, also not as a checkpoint stores it.
        weight: None once it is packed.
        packed: the packed weight.
    """

    is_exact = False
    weight: nn.Parameter | None
    packed: PackedWeight | None

    @abstractmethod
    def pack_weights(self, quantization: Quantization) -> None:
        """Replace complete parameters by packed weights, quantized if asked for, where the kernels support it."""

    @abstractmethod
    def can_use(self, packed: PackedWeight) -> bool:
        """Whether a weight that was packed as a checkpoint stores it can replace the layer's."""

    @abstractmethod
    def use(self, packed: PackedWeight | None) -> None:
        """Replace the weight by a packed one; None: keep it."""

    @property
    @abstractmethod
    def packed_bytes(self) -> int:
        """Bytes of the packed weights, which are not parameters any more."""


class Linear(Packable):
    """y = x W^T + b, where the rows of W are the outputs of one or more projections.

    Attributes:
        size_in: inputs.
        parts: rows of each projection, in order.
        packed: the packed weight; `weight` is then None.
        six_bit_rows: rows at the end that get 6 bits with int4 on CPUs.
        lora: weights of adapters, whose products are added for some rows; None for most layers.
    """

    def __init__(self, size_in: int, *parts: int, bias: bool = False) -> None:
        super().__init__()
        self.size_in = size_in
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(sum(parts), size_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(parts)), requires_grad=False) if bias else None
        self.packed: PackedWeight | None = None
        self.six_bit_rows = 0
        self.lora: LoRA | None = None

    def pack_weights(self, quantization: Quantization) -> None:
        if self.weight is not None:
            self.use(pack_weight(self.weight, quantization, six_bit_rows=self.six_bit_rows))

    def can_use(self, packed: PackedWeight) -> bool:
        return not self.is_exact

    def use(self, packed: PackedWeight | None) -> None:
        self.packed = packed
        if packed is not None:
            self.weight = None
            if self.bias is not None:  # it may be loaded later, in float32 then
                self.bias.data = self.bias.data.float()

    @property
    def packed_bytes(self) -> int:
        return 0 if self.packed is None else self.packed.nbytes

    def put_lora(self, lora_id: int, lora_a: Tensor, lora_b: Tensor, *, num_adapters: int) -> None:
        """Give an adapter its weights for this layer; see `LoRA`."""
        self.lora = self.lora or LoRA(num_adapters)
        self.lora.put(lora_id, lora_a, lora_b)

    def forward(
        self,
        x: Tensor,
        *,
        act: str | None = None,
        lora: LoRARows | None = None,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """(tokens, size_in) to (tokens, sum(parts)).

        Args:
            x: the input.
            act: activation of the result; None: none. Not with `out`.
            lora: rows that adapters apply to; None: none. Not with `out_dtype` and `out`.
            out_dtype: see `PackedWeight`.
            out: see `PackedWeight`.
        """
        if lora is not None and self.lora is not None:
            return _activated(self.lora.add(self(x), x, lora), act)
        if self.packed is not None:
            name = None if act is None else kernel_activation(act)
            y = self.packed(x, self.bias, act=name, out_dtype=out_dtype, out=out)
            return _activated(y, act) if name is None else y
        assert self.weight is not None
        y = _activated(F.linear(x, self.weight, self.bias), act)
        y = y if out_dtype is None else y.to(out_dtype)
        return y if out is None else out.copy_(y)


class Head(Linear):
    """The projection to logits. It keeps 8 bits with int4: an error of a logit changes the token that is chosen."""

    @override
    def pack_weights(self, quantization: Quantization) -> None:
        super().pack_weights("int8" if quantization == "int4" else quantization)


def use_exact_inputs(layers: Iterable[Packable]) -> None:
    """Let layers with weights in groups, which some share, multiply with the same numbers and round no inputs."""
    exact: dict[PackedGroups, PackedBFloat16] = {}
    for layer in layers:
        packed = layer.packed
        if isinstance(packed, PackedGroups):
            if packed not in exact:
                exact[packed] = PackedBFloat16(packed.dequantize(torch.bfloat16))
            layer.use(exact[packed])


def _activated(y: Tensor, act: str | None) -> Tensor:
    """act(y); it may overwrite y."""
    return y if act is None else activation(y, act, in_place=True)


class LoRA(nn.Module):
    """Products of two small weights that are added to the result of a linear layer (Hu et al. 2021), by adapter.

    On GPUs the weights of all adapters are stacked: ranks that an adapter does not have are zero.

    Attributes:
        lora_a: (adapters, rank, size_in) on GPUs; None elsewhere.
        lora_b: (adapters, size_out, rank) on GPUs, times the scales of the adapters; None elsewhere.
        products: both products of an adapter, by its id, elsewhere.
    """

    def __init__(self, num_adapters: int) -> None:
        """`num_adapters`: those of the model; their ids are below it."""
        super().__init__()
        self._num_adapters = num_adapters
        self.lora_a: nn.Parameter | None = None
        self.lora_b: nn.Parameter | None = None
        self.products = nn.ModuleDict()

    def put(self, lora_id: int, lora_a: Tensor, lora_b: Tensor) -> None:
        """Give an adapter its weights. lora_a: (rank, size_in); lora_b: (size_out, rank), times the adapter's scale."""
        if gpu.supports(lora_a):
            self.lora_a = _stacked(self.lora_a, self._num_adapters, lora_id, lora_a)
            self.lora_b = _stacked(self.lora_b, self._num_adapters, lora_id, lora_b)
        else:
            self.products[str(lora_id)] = nn.Sequential(*(_linear_of(weight) for weight in (lora_a, lora_b)))

    def add(self, y: Tensor, x: Tensor, rows: LoRARows) -> Tensor:
        """y (tokens, size_out), of which some rows get x's product; it may be changed. x: (tokens, size_in)."""
        if isinstance(rows, SortedRows):
            assert self.lora_a is not None
            assert self.lora_b is not None
            return add_lora(y, x, self.lora_a, self.lora_b, rows)
        for lora_id, indices in rows.items():
            if (name := str(lora_id)) not in self.products:
                continue
            product = self.products[name]
            if indices is None:
                y = add_scaled(y, product(x))
            else:
                y = y.index_copy_(0, indices, add_scaled(take_rows(y, indices), product(take_rows(x, indices))))
        return y


def _stacked(stack: nn.Parameter | None, count: int, index: int, weight: Tensor) -> nn.Parameter:
    """The weights of all adapters, with that of one of them, whose rank may be larger than those of others."""
    if count == 1:
        return nn.Parameter(weight[None], requires_grad=False)
    before = weight.new_zeros(count, 0, 0) if stack is None else stack.data
    shape = [max(sizes) for sizes in zip(before.shape[1:], weight.shape, strict=True)]
    stacked = weight.new_zeros(count, *shape)
    stacked[:, : before.shape[1], : before.shape[2]] = before
    stacked[index] = 0
    stacked[index, : weight.shape[0], : weight.shape[1]] = weight
    return nn.Parameter(stacked, requires_grad=False)


def _linear_of(weight: Tensor) -> Linear:
    linear = Linear(weight.shape[1], weight.shape[0])
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.pack_weights("none")
    return linear
