"""Bitmasks over logits; the twin of `quire.kernels.token_bitmask.reference`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.variants import KernelVariant
from quire.kernels.triton.vocab import CHUNK


@triton.jit
def allowed_tokens(masks, mask, ids, vocab, words):
    """Whether a mask allows some token ids."""
    inside = ids < vocab
    word = tl.load(masks + mask * words + ids // 32, mask=inside, other=0)
    return inside & (((word >> (ids % 32)) & 1) != 0)


@triton.jit
def mask_kernel(logits, masks, mask_of_row, states, stride, vocab, words, chunks, CHUNK: tl.constexpr):
    """One program for a chunk of a row. Its state: whether a logit is NaN, or is allowed and above -inf."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mask = tl.load(mask_of_row + row).to(tl.int64)
    if mask >= 0:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        allowed = allowed_tokens(masks, mask, ids, vocab, words)
        x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=-float("inf"))
        nan = x != x
        tl.store(states + row * chunks + chunk, tl.max((nan | (allowed & (x > -float("inf")))).to(tl.int32), 0))
        forbidden = (ids < vocab) & ~allowed & ~nan
        tl.store(logits + row * stride + ids, tl.full((CHUNK,), -float("inf"), tl.float32), mask=forbidden)


@triton.jit
def reset_kernel(
    logits, masks, mask_of_row, states, stride, vocab, words, chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """The allowed logits of a row become 0 if all of them are -inf, and none of the row is NaN."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mask = tl.load(mask_of_row + row).to(tl.int64)
    if mask >= 0:
        lanes = tl.arange(0, CHUNKS)
        state = tl.load(states + row * chunks + lanes, mask=lanes < chunks, other=0)
        if tl.max(state, 0) == 0:
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            allowed = allowed_tokens(masks, mask, ids, vocab, words)
            tl.store(logits + row * stride + ids, tl.zeros((CHUNK,), tl.float32), mask=allowed)


def mask_logits(logits: Tensor, masks: Tensor, mask_of_row: Tensor) -> None:
    """Set the logits of tokens to -inf that a mask does not allow; see `quire.kernels.token_bitmask.mask_logits`.

    Args:
        logits: (rows, vocab) float32, last stride 1, changed in place.
        masks: (masks, words) int32, contiguous.
        mask_of_row: (rows,) int32.
    """
    rows, vocab = logits.shape
    if not rows:
        return
    chunks = triton.cdiv(vocab, CHUNK)
    states = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    arguments = (logits, masks, mask_of_row, states, logits.stride(0), vocab, masks.shape[1], chunks)
    mask_kernel[(rows, chunks)](*arguments, CHUNK=CHUNK, num_warps=8)
    reset_kernel[(rows, chunks)](*arguments, CHUNK=CHUNK, CHUNKS=triton.next_power_of_2(chunks))


_SIGNATURE = {
    "logits": "*fp32",
    **dict.fromkeys(("masks", "mask_of_row", "states"), "*i32"),
    **dict.fromkeys(("stride", "vocab", "words", "chunks"), "i32"),
}
VARIANTS = [
    KernelVariant(mask_kernel, _SIGNATURE, {"CHUNK": CHUNK}, num_warps=8),
    KernelVariant(reset_kernel, _SIGNATURE, {"CHUNK": CHUNK, "CHUNKS": 64}),
    KernelVariant(  # Triton makes integers that are 1 constants
        reset_kernel,
        {name: kind for name, kind in _SIGNATURE.items() if name not in ("words", "chunks")},
        {"words": 1, "chunks": 1, "CHUNK": CHUNK, "CHUNKS": 1},
    ),
]
