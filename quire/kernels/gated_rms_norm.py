"""Root mean square norm of groups of elements, with a gate before or behind it (Dao and Gu 2024)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import gpu, native
from quire.kernels.capture import empty

_MAX_GROUP = 32768  # elements of the compiled kernel


GateActivation = Literal["silu", "sigmoid"]


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    group: int,
    eps: float,
    *,
    gate_first: bool,
    gate_act: GateActivation = "silu",
) -> Tensor:
    """The norm of each `group` elements of x * silu(gate), times the weight.

    Args:
        x: (rows, dim), last stride 1.
        gate: (rows, dim), last stride 1.
        weight: (dim,).
        group: elements that are normalized together.
        eps: added to the mean of squares.
        gate_first: False: the gate is multiplied with the result.
        gate_act: the gate's activation; with `gate_first` it is silu.
    """
    if native.supports(x, gate, weight) and group % native.LANES == 0 and group <= _MAX_GROUP:
        out = empty(x.shape, x.dtype)
        native.kernels.gated_rms_norm(
            x=x,
            gate=gate,
            weight=weight,
            out=out,
            group=group,
            eps=eps,
            gate_first=int(gate_first),
            sigmoid=int(gate_act == "sigmoid"),
        )
        return out
    if gpu.supports(x, gate, weight) and gate_act == "silu":
        from quire.kernels.triton import gated_rms_norm as kernel

        return kernel.gated_rms_norm(x, gate, weight, group, eps, gate_first=gate_first)
    return reference(x, gate, weight, group, eps, gate_first=gate_first, gate_act=gate_act)


def reference(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    group: int,
    eps: float,
    *,
    gate_first: bool,
    gate_act: GateActivation = "silu",
) -> Tensor:
    """`gated_rms_norm` in torch."""
    factor = F.silu(gate.float()) if gate_act == "silu" else gate.float().sigmoid()
    parts = (x.float() * factor if gate_first else x.float()).unflatten(1, (-1, group))
    normed = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(1)
    out = normed.to(x.dtype).float() * weight.float()
    result: Tensor = out if gate_first else out * factor
    return result.to(x.dtype)
