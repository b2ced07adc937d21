"""Attention of packed sequences to themselves; the twin of `quire.kernels.varlen_attention.reference`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quire.kernels import gpu
from quire.kernels.triton import tuning
from quire.kernels.triton.attention_tiles import PLAIN, TABLE, head_sizes
from quire.kernels.triton.paged_prefill import prefill_grid, prefill_kernel, prefill_variant


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    biases: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Attention of each token to the tokens of its own sequence, by the kernel of `paged_prefill` without pages.

    Args:
        q: (tokens, heads, dim) float32, float16 or bfloat16, last stride 1.
        k: (tokens, kv_heads, dim), like v.
        cu_seqlens: (sequences + 1,) int32 or int64, where each sequence begins, and then the end. Sequences may be
            empty. Tokens past the end are not written.
        window: the largest distance of a key that a query attends to.
        softcap: scores become softcap * tanh(score / softcap).
        alibi_slopes: (heads,) float32; a score is lowered by slope * distance.
        biases: (heads, 2 * reach + 1) float32 contiguous, added to scores by distance.
        causal: whether queries only attend to keys up to their own position.

    Returns:
        (tokens, heads, dim) of q's dtype.
    """
    (tokens, heads, dim), kv_heads, sequences = q.shape, k.shape[1], len(cu_seqlens) - 1
    out = torch.empty((tokens, heads, v.shape[2]), dtype=q.dtype, device=q.device)
    if not tokens or not sequences:
        return out
    config = tuning.config(TABLE, "varlen", q.device, width=max(dim, v.shape[2]), bits=8 * q.itemsize)
    group = heads // kv_heads
    prefill_kernel[prefill_grid(tokens, sequences, heads, kv_heads, config["BLOCK_M"])](
        q, k, v, k, v, q, cu_seqlens, cu_seqlens, cu_seqlens, q, q if alibi_slopes is None else alibi_slopes,
        q if biases is None else biases, cu_seqlens, out,
        q.stride(0), q.stride(1), 0, out.stride(0), out.stride(1), k.stride(1), 0, k.stride(0), v.stride(1), 0,
        v.stride(0), sequences, scale, softcap or 0.0, 1.0, 0 if window is None else window + 1,
        0 if biases is None else biases.shape[1] // 2,
        GROUP=group, TILES=triton.cdiv(group, config["BLOCK_M"]), **head_sizes(dim, v.shape[2]), PAGE_SIZE=0,
        PAGE_TYPE=PLAIN.value, SHARED=False, CAUSAL=causal, WINDOW=window is not None, SINKS=False,
        SOFTCAP=softcap is not None, ALIBI=alibi_slopes is not None, BIAS=biases is not None,
        VISIBLE=False, HEAD_SCALES=False, INTERPRETED=gpu.is_interpreted(), **config,
    )  # fmt: skip
    return out


_ENCODER = {"PAGE_SIZE": 0, "CAUSAL": False}
VARIANTS = [
    prefill_variant("varlen", "bf16", "bf16", 1, 64, 64, **_ENCODER),
    prefill_variant("varlen", "fp32", "fp32", 1, 64, 64, **_ENCODER, WINDOW=True, BIAS=True, ALIBI=True, SOFTCAP=True),
]
