"""Layer norm (Ba et al. 2016)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from quire.kernels import gpu, native
from quire.kernels.capture import empty

_MAX_DIM = 16384


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None) -> Tensor:
    """(v - mean) / sqrt(variance + eps) * weight + bias over the last dimension of v = x + residual.

    Computed in float32, the sum too, and rounded to x's dtype at the end.

    Args:
        x: (rows, dim).
        weight: (dim,) of x's dtype, like bias.
        residual: (rows, dim).
    """
    tensors = [tensor for tensor in (x, weight, bias, residual) if tensor is not None]
    if x.dim() == 2 and 0 < x.shape[1] <= _MAX_DIM and native.supports(*tensors):
        out = empty(x.shape, x.dtype)
        native.kernels.layer_norm(x=x, residual=residual, weight=weight, bias=bias, out=out, eps=eps)
        return out
    if gpu.supports(*tensors) and all(tensor.stride(-1) == 1 for tensor in tensors):
        from quire.kernels.triton import layer_norm as kernel

        return kernel.layer_norm(x, weight, bias, eps, residual)
    return reference(x, weight, bias, eps, residual)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None) -> Tensor:
    """`layer_norm` in torch."""
    total = x.float() if residual is None else x.float() + residual.float()
    normed = F.layer_norm(total, x.shape[-1:], weight.float(), None if bias is None else bias.float(), eps)
    return normed.to(x.dtype)
