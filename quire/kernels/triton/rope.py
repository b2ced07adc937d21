"""Norm and rotary embedding of heads; the twin of `quire.kernels.rope.reference` and `quire.kernels.qk_norm_rope`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.variants import KernelVariant

_ELEMENTS = 2048  # of the heads of a program


@triton.jit
def norm_rope_kernel(
    x,
    out,
    cos,
    sin,
    q_weight,
    k_weight,
    token_stride,
    head_stride,
    heads,
    q_heads,
    dim,
    pairs,
    eps,
    offset,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """One program for some heads of a token. Element `own` of a head is rotated with `partner` to a place in `out`."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    place = tl.arange(0, DIM)
    inside = (head[:, None] < heads) & (place[None, :] < dim)
    rotated = place < 2 * pairs
    second = (place >= pairs) & rotated
    pair = tl.where(second, place - pairs, place)
    if INTERLEAVED:
        own = tl.where(rotated, 2 * pair + second.to(tl.int32), place)
        partner = tl.where(rotated, 2 * pair + 1 - second.to(tl.int32), place)
    else:
        own = place
        partner = tl.where(rotated, tl.where(second, pair, pair + pairs), place)
    rows = x + token * token_stride + head[:, None] * head_stride
    values = tl.load(rows + own[None, :], mask=inside, other=0.0).to(tl.float32)
    partners = values
    if ROTATE:
        partners = tl.load(rows + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(values * values, 1) / dim + eps)[:, None]
        valid = place < dim
        is_query = (head < q_heads)[:, None]
        q = tl.load(q_weight + own, mask=valid, other=0.0).to(tl.float32)[None, :]
        k = tl.load(k_weight + own, mask=valid, other=0.0).to(tl.float32)[None, :]
        values = values * factor * (tl.where(is_query, q, k) + offset)
        if ROTATE:
            q = tl.load(q_weight + partner, mask=valid, other=0.0).to(tl.float32)[None, :]
            k = tl.load(k_weight + partner, mask=valid, other=0.0).to(tl.float32)[None, :]
            partners = partners * factor * (tl.where(is_query, q, k) + offset)
    if ROTATE:
        cosine = tl.load(cos + token * pairs + pair, mask=rotated, other=1.0)
        sine = tl.load(sin + token * pairs + pair, mask=rotated, other=0.0)
        turned = values * cosine[None, :] + partners * tl.where(second, sine, -sine)[None, :]
        values = tl.where(rotated[None, :], turned, values)
    to = out + (token * heads + head[:, None]) * dim + place[None, :]
    tl.store(to, values.to(out.dtype.element_ty), mask=inside)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first 2 * pairs elements of each head; see `quire.kernels.rope.apply_rope`.

    Args:
        x: (tokens, heads, dim) float32, float16 or bfloat16, last stride 1.
        cos: (tokens, pairs) float32, like sin.

    Returns:
        as x, contiguous.
    """
    return _run(x, x.shape[1], None, 0.0, 0.0, (cos, sin), interleaved)


def qk_norm_rope(
    x: Tensor,
    q_heads: int,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
    offset: float,
    angles: tuple[Tensor, Tensor] | None,
    *,
    interleaved: bool,
) -> Tensor:
    """The heads of queries and then of keys, normed with the weights of either and rotated as by `apply_rope`.

    Args:
        x: (tokens, heads, dim) float32, float16 or bfloat16, last stride 1; the first `q_heads` are queries.
        weights: of the norms of queries and of keys, each (dim,); None for no norms.
        angles: cos and sin, each (tokens, pairs) float32; None for no rotation.

    Returns:
        as x, contiguous.
    """
    return _run(x, q_heads, weights, eps, offset, angles, interleaved)


def _run(
    x: Tensor,
    q_heads: int,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
    offset: float,
    angles: tuple[Tensor, Tensor] | None,
    interleaved: bool,
) -> Tensor:
    tokens, heads, dim = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    cos, sin = (x, x) if angles is None else (angle.contiguous() for angle in angles)
    q_weight, k_weight = (x, x) if weights is None else weights
    width = triton.next_power_of_2(dim)
    group = min(triton.next_power_of_2(heads), max(1, _ELEMENTS // width))
    norm_rope_kernel[(tokens, triton.cdiv(heads, group))](
        x,
        out,
        cos,
        sin,
        q_weight,
        k_weight,
        x.stride(0),
        x.stride(1),
        heads,
        q_heads,
        dim,
        0 if angles is None else cos.shape[1],
        eps,
        offset,
        NORM=weights is not None,
        ROTATE=angles is not None,
        INTERLEAVED=interleaved,
        HEADS=group,
        DIM=width,
        num_warps=4 if group * width >= _ELEMENTS else 1,
    )
    return out


VARIANTS = [
    KernelVariant(
        norm_rope_kernel,
        {
            **dict.fromkeys(("x", "out"), "*bf16"),
            **dict.fromkeys(("cos", "sin"), "*fp32" if rotate else "*bf16"),
            **dict.fromkeys(("q_weight", "k_weight"), "*bf16"),
            **dict.fromkeys(("token_stride", "head_stride", "heads", "q_heads", "dim", "pairs"), "i32"),
            **dict.fromkeys(("eps", "offset"), "fp32"),
        },
        {"NORM": norm, "ROTATE": rotate, "INTERLEAVED": interleaved, "HEADS": 16, "DIM": 128},
    )
    for norm, rotate, interleaved in (
        (True, True, False),
        (False, True, False),
        (False, True, True),
        (True, False, False),
    )
]
VARIANTS.append(  # the single key head of latent attention; Triton makes integers that are 1 constants
    KernelVariant(
        norm_rope_kernel,
        {name: kind for name, kind in VARIANTS[1].signature.items() if name not in ("heads", "q_heads")},
        {**VARIANTS[1].constants, "heads": 1, "q_heads": 1, "HEADS": 1, "DIM": 64},
        num_warps=1,
    )
)
