"""Causal convolution of each channel over time, which continues from the last inputs of each sequence."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import gpu, native
from quire.kernels.capture import empty

_WIDTHS = range(2, 9)  # of the compiled kernels


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    *,
    activation: Literal["silu"] | None = None,
    input_gate: Tensor | None = None,
    output_gate: Tensor | None = None,
) -> Tensor:
    """Convolve the channels of tokens with those of earlier ones: the last tap is that of the token itself.

    A result depends neither on how a sequence is divided among calls, nor on other sequences.

    Args:
        x: (tokens, channels), last stride 1.
        weight: (channels, width); fastest as the transposed view of a contiguous (width, channels).
        bias: (channels,).
        state: (slots, width - 1, channels) float32, the inputs before the first token of each sequence, the oldest
            first; changed to those before the next one.
        slots: (sequences,) int64, the state of each sequence; no two are equal. On GPUs -1 is padding without a state.
        cu_seqlens: (sequences + 1,) int64 on the host, where the tokens of each sequence begin, and where the last end.
        activation: of the results.
        input_gate: (tokens, channels), x is multiplied with it, and rounded to its dtype.
        output_gate: (tokens, channels), results are multiplied with it after the activation.

    Returns:
        (tokens, channels) in x's dtype, contiguous.
    """
    if _runs_natively(x, weight, bias, input_gate, output_gate):
        out = empty(x.shape, x.dtype)
        native.kernels.causal_conv(
            x=x,
            weight=weight.t().contiguous(),
            bias=bias,
            state=state,
            slots=slots,
            cu_seqlens=cu_seqlens,
            input_gate=input_gate,
            output_gate=output_gate,
            out=out,
            silu=int(activation == "silu"),
        )
        return out
    gated = x if input_gate is None else x * input_gate
    if gpu.supports(gated, weight, state) and gated.stride(-1) == 1:
        from quire.kernels.triton import causal_conv as kernel

        return kernel.causal_conv(gated, weight, bias, state, slots, cu_seqlens, output_gate, silu=activation == "silu")
    return reference(gated, weight, bias, state, slots, cu_seqlens, output_gate, silu=activation == "silu")


def _runs_natively(x: Tensor, weight: Tensor, *others: Tensor | None) -> bool:
    tensors = (x, *(tensor for tensor in others if tensor is not None))
    if not native.supports(*tensors) or weight.dtype != x.dtype or weight.device.type != "cpu":
        return False
    return x.shape[1] >= native.LANES and weight.shape[1] in _WIDTHS


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    output_gate: Tensor | None,
    *,
    silu: bool,
) -> Tensor:
    """`causal_conv` in torch, without an input gate."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    bounds, taps = cu_seqlens.tolist(), weight.float().t()
    for slot, begin, end in zip(slots.tolist(), bounds, bounds[1:], strict=False):
        if slot < 0:
            continue
        inputs = torch.cat((state[slot], x[begin:end].float()))
        state[slot] = inputs[end - begin :]
        out[begin:end] = 0.0 if bias is None else bias.float()
        for place, tap in enumerate(taps):
            out[begin:end] += inputs[place : place + end - begin] * tap
    if silu:
        out = F.silu(out)
    if output_gate is not None:
        out *= output_gate.float()
    return out.to(x.dtype)
