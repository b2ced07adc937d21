"""Products of tokens with the weights of their experts, on GPUs."""

from __future__ import annotations

from collections.abc import Callable

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
    pairs, (kind, values, scales) = chosen.numel(), gate_up.data
    rows = prepare_rows(x, gate_up.data)
    inner = torch.empty((pairs, values.shape[1]), dtype=x.dtype, device=x.device)
    grouped_matmul(
        rows.values,
        values,
        inner,
        order,
        totals,
        kind=kind,
        x_scales=rows.scales,
        scales=scales,
        scale_rows=gate_up.data.scale_rows,
        bias=gate_up_bias,
        gather=chosen.shape[1],
    )
    rows = prepare_rows(act(inner), down.data)
    kind, values, scales = down.data
    out = torch.empty((pairs, values.shape[1]), dtype=x.dtype, device=x.device)
    grouped_matmul(
        rows.values,
        values,
        out,
        order,
        totals,
        kind=kind,
        x_scales=rows.scales,
        scales=scales,
        scale_rows=down.data.scale_rows,
        bias=down_bias,
        row_weights=weights,
        scatter=True,
    )
    return sum_pairs(out, chosen)
