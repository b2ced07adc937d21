"""Logit softcapping; the twin of `quire.kernels.softcap.reference`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.numerics import tanh
from quire.kernels.triton.variants import KernelVariant

_BLOCK = 1024  # elements of a program


@triton.jit
def softcap_kernel(x, count, cap, BLOCK: tl.constexpr):
    """All elements of a contiguous tensor."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(x + at, (cap * tanh(values / cap)).to(x.dtype.element_ty), mask=at < count)


def softcap_in_place(x: Tensor, cap: float) -> None:
    """cap * tanh(x / cap) of all elements of a contiguous tensor: float32, float16 or bfloat16."""
    if x.numel():
        softcap_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, x.numel(), cap, BLOCK=_BLOCK)


VARIANTS = [KernelVariant(softcap_kernel, {"x": "*fp32", "count": "i64", "cap": "fp32"}, {"BLOCK": _BLOCK})]
