"""Norm and rotary embedding of heads, and the write of keys and values to pages."""

from __future__ import annotations

from torch import Tensor

from quire.kernels import gpu
from quire.kernels.projected_heads import ProjectedHeads
from quire.kernels.qk_norm_rope import qk_norm_rope
from quire.kernels.write_pages import triton_supports, write_pages


def qk_norm_rope_write(
    projected: ProjectedHeads,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    head_scales: Tensor | None = None,
) -> Tensor:
    """Norm and rotate the heads of queries and keys, and write keys and values to their slots.

    On GPUs this is one kernel, elsewhere and if there is nothing to norm or rotate it is `in_two_ops`.

    Args:
        projected: the heads of all tokens.
        keys: pages of rows with the dim of the heads, like values; see `quire.kernels.paged_attention`.
        slots: (tokens,) int64, see `quire.kernels.write_pages`.
        key_scale: of pages of float8, like value_scale and head_scales; see `quire.kernels.paged_attention`.

    Returns:
        (tokens, heads, dim) queries.
    """
    norms, angles = projected.norms, projected.angles
    changes = norms is not None or angles is not None
    if changes and gpu.supports(projected.qkv, keys, values, slots) and triton_supports(keys, values):
        from quire.kernels.triton import qk_norm_rope_write as kernel

        return kernel.qk_norm_rope_write(
            projected.split,
            projected.heads,
            norms,
            angles,
            keys,
            values,
            slots,
            key_scale=key_scale,
            value_scale=value_scale,
            head_scales=head_scales,
        )
    return in_two_ops(projected, keys, values, slots, key_scale, value_scale, head_scales)


def in_two_ops(
    projected: ProjectedHeads,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    key_scale: float,
    value_scale: float,
    head_scales: Tensor | None = None,
) -> Tensor:
    """`qk_norm_rope_write` as the ops `qk_norm_rope` and `write_pages`."""
    q, k, v = qk_norm_rope(projected)
    write_pages(keys, values, slots, k, v, key_scale, value_scale, head_scales)
    return q
