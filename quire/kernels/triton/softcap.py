"""Logit softcapping; the twin of `quire.kernels.softcap.reference`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.numerics import tanh
from quire.kernels.triton.variants import KernelVariant

_BLOCK = 1024  # elements of a program


@triton.jit
def softcap_kernel(x, out, count, cap, BLOCK: tl.constexpr):
    """All elements of contiguous tensors."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out + at, (cap * tanh(values / cap)).to(out.dtype.element_ty), mask=at < count)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) of all elements of x, of any shape: float32, float16 or bfloat16."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        softcap_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, out, x.numel(), cap, BLOCK=_BLOCK)
    return out


VARIANTS = [
    KernelVariant(softcap_kernel, {"x": "*fp32", "out": "*fp32", "count": "i64", "cap": "fp32"}, {"BLOCK": _BLOCK})
]
