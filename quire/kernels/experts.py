"""Products of tokens with the weights of their experts, on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.kernels import gpu, native
from quire.kernels.gpu_weights import StackedWeights, prepare_rows


def can_stack(weight: Tensor) -> bool:
    """Whether the weights of experts on this one's device are to be in one tensor, for `run_experts`."""
    return gpu.supports(weight) and not native.supports(weight)


def run_experts(
    x: Tensor,
    gate_up: StackedWeights,
    down: StackedWeights,
    act: Callable[[Tensor], Tensor],
    chosen: Tensor,
    weights: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """The weighted sum of each token's experts: sum_i w_i (down_i act(gate_up_i x + b_i) + c_i).

    A fixed sequence of launches, which does not wait for the device.

    Args:
        x: (tokens, hidden).
        gate_up: (experts, outputs, hidden).
        down: (experts, hidden, size).
        act: (pairs, outputs) to (pairs, size).
        chosen: (tokens, top_k) integers; -1: no expert, whatever the weight is.
        weights: (tokens, top_k) float32.
        gate_up_bias: (experts, outputs), contiguous.
        down_bias: (experts, hidden), contiguous.

    Returns:
        (tokens, hidden) of x's dtype.
    """
    from quire.kernels.triton.grouped_matmul import grouped_matmul, sort_pairs
    from quire.kernels.triton.routing import sum_pairs

    order, totals = sort_pairs(chosen.flatten(), gate_up.experts)

    def products(rows: Tensor, stack: StackedWeights, **options: Any) -> Tensor:
        """Those of pairs with their experts, of x's dtype."""
        data = stack.data
        inputs = prepare_rows(rows, data)
        return grouped_matmul(
            inputs.values,
            data.values,
            torch.empty((len(order), data.size_out), dtype=x.dtype, device=x.device),
            order,
            totals,
            kind=data.kind,
            x_scales=inputs.scales,
            scales=data.scales,
            scale_rows=data.scale_rows,
            groups=data.groups,
            **options,
        )

    inner = products(x, gate_up, bias=gate_up_bias, gather=chosen.shape[1])
    return sum_pairs(products(act(inner), down, bias=down_bias, row_weights=weights, scatter=True), chosen)
