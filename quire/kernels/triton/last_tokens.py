"""Token ids that only the device knows; the twin of `quire.kernels.last_tokens.reference`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.variants import KernelVariant

_BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def fill_last_tokens_kernel(token_ids, last_tokens, count, BLOCK: tl.constexpr):
    """One program for each BLOCK tokens."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(token_ids + index, mask=index < count, other=0)
    unknown = ids < 0
    last = tl.load(last_tokens - 1 - ids, mask=unknown, other=0)
    tl.store(token_ids + index, last, mask=unknown)


def fill_last_tokens(token_ids: Tensor, last_tokens: Tensor) -> None:
    """Replace each negative id -1 - row by the last token of that row.

    Args:
        token_ids: (tokens,) int64, changed in place.
        last_tokens: (rows,) int64.
    """
    count = len(token_ids)
    if count:
        fill_last_tokens_kernel[(triton.cdiv(count, _BLOCK),)](token_ids, last_tokens, count, BLOCK=_BLOCK)


VARIANTS = [
    KernelVariant(
        fill_last_tokens_kernel,
        {"token_ids": "*i64", "last_tokens": "*i64", "count": "i32"},
        {"BLOCK": _BLOCK},
    )
]
