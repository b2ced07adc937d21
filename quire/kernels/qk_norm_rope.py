"""Norm and rotary embedding of the heads of queries and keys."""

from __future__ import annotations

from torch import Tensor

from quire.kernels import gpu, native
from quire.kernels.projected_heads import CosSin, ProjectedHeads, QKNormWeights
from quire.kernels.rms_norm import rms_norm
from quire.kernels.rope import apply_rope


def qk_norm_rope(projected: ProjectedHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Split a projection into the heads of queries, keys and values; norm and rotate those of queries and keys.

    Returns:
        (tokens, heads, dim), (tokens, kv_heads, dim), (tokens, kv_heads, dim)
    """
    heads, kv_heads, norms, angles = projected.heads, projected.kv_heads, projected.norms, projected.angles
    split = projected.split
    if norms is None and angles is None:
        return _parts(split, heads, kv_heads)
    if _is_supported(split, norms):
        _native(split, heads, kv_heads, norms, angles)
        return _parts(split, heads, kv_heads)
    if gpu.supports(split):
        from quire.kernels.triton import rope as kernel

        both = kernel.qk_norm_rope(split[:, : heads + kv_heads], heads, norms, angles)
        return both[:, :heads], both[:, heads:], split[:, heads + kv_heads :]
    q, k, v = _parts(split, heads, kv_heads)
    if norms is not None:
        q, k = (rms_norm(x, weight, norms.eps, norms.offset) for x, weight in ((q, norms.query), (k, norms.key)))
    if angles is not None:
        q, k = (apply_rope(x, angles.cos, angles.sin, interleaved=angles.interleaved) for x in (q, k))
    return q, k, v


def _parts(split: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    return split[:, :heads], split[:, heads : heads + kv_heads], split[:, heads + kv_heads :]


def _is_supported(split: Tensor, norms: QKNormWeights | None) -> bool:
    dim = split.shape[2]
    if not native.LANES <= dim <= native.MAX_DIM or (norms is not None and dim % native.LANES):
        return False
    return native.supports(split) if norms is None else native.supports(split, norms.query, norms.key)


def _native(split: Tensor, heads: int, kv_heads: int, norms: QKNormWeights | None, angles: CosSin | None) -> None:
    native.kernels.qk_norm_rope(
        x=split,
        cos=None if angles is None else angles.cos.contiguous(),
        sin=None if angles is None else angles.sin.contiguous(),
        q_weight=None if norms is None else norms.query,
        k_weight=None if norms is None else norms.key,
        q_heads=heads,
        k_heads=kv_heads,
        eps=0.0 if norms is None else norms.eps,
        offset=0.0 if norms is None else norms.offset,
        interleaved=int(angles is not None and angles.interleaved),
    )
