"""Functions of elements, which kernels share. They take and return float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh(x): near 0 by its Taylor series, as the other formula cancels there; elsewhere by an exponential."""
    square = x * x
    series = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    size = tl.abs(x)
    decay = tl.exp(-2.0 * size)
    ratio = (1.0 - decay) / (1.0 + decay)
    return tl.where(size < 0.25, series, tl.where(x < 0, -ratio, ratio))


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x), without an exponential that overflows."""
    decay = tl.exp(-tl.abs(x))
    return tl.where(x < 0, decay, 1.0) / (1.0 + decay)


@triton.jit
def softplus(x):
    """log(1 + e^x), without an exponential that overflows."""
    decay = tl.exp(-tl.abs(x))
    return tl.where(x > 0, x, 0.0) + tl.where(decay < 1e-4, decay, tl.log(1.0 + decay))


@triton.jit
def activate(x, ACT: tl.constexpr):
    """The activation that `quire.kernels.activation` calls ACT."""
    if ACT == "silu":
        y = x * sigmoid(x)
    elif ACT == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        y = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACT == "quick_gelu":
        y = x * sigmoid(1.702 * x)
    elif ACT == "relu":
        y = tl.where(x < 0, 0.0, x)
    elif ACT == "relu2":
        y = tl.where(x < 0, 0.0, x * x)
    elif ACT == "relu6":
        y = tl.where(x < 0, 0.0, tl.where(x > 6, 6.0, x))
    elif ACT == "leaky_relu":
        y = tl.where(x < 0, 0.01 * x, x)
    elif ACT == "mish":
        grown = tl.exp(tl.where(x > 20, 20.0, x))  # tanh(log(1 + e^x)) is a ratio of polynomials in e^x
        y = x * (grown * (grown + 2.0)) / (grown * (grown + 2.0) + 2.0)
    elif ACT == "hardswish":
        y = x * tl.where(x < -3, 0.0, tl.where(x > 3, 6.0, x + 3.0)) / 6.0
    elif ACT == "sigmoid":
        y = sigmoid(x)
    elif ACT == "tanh":
        y = tanh(x)
    else:
        tl.static_assert(ACT == "linear", "an activation of quire.kernels.activation is expected")
        y = x
    return y
