"""Norm and rotary embedding of heads; the twin of `quire.kernels.rope.reference` and `quire.kernels.qk_norm_rope`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.projected_heads import CosSin, QKNormWeights
from quire.kernels.triton.variants import KernelVariant

_ELEMENTS = 2048  # of the heads of a program


@triton.jit
def tile_heads(tile, q_heads, heads, HEADS: tl.constexpr):
    """The heads of a tile of HEADS, which has queries only or keys only.

    q_heads, heads: the number of heads of queries, and of queries and keys.

    Returns:
        whether they are of queries, (HEADS,) their indices, (HEADS,) whether there are such heads.
    """
    q_tiles = tl.cdiv(q_heads, HEADS)
    is_query = tile < q_tiles
    head = tl.where(is_query, tile * HEADS, q_heads + (tile - q_tiles) * HEADS) + tl.arange(0, HEADS)
    return is_query, head, head < tl.where(is_query, q_heads, heads)


@triton.jit
def norm_and_rotate(
    rows, inside, weight, cos, sin, dim, pairs, eps, offset,
    NORM: tl.constexpr, ROTATE: tl.constexpr, INTERLEAVED: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Heads of one token, normed and rotated: (heads, DIM) float32.

    Element `source` of a head is rotated with `partner` to a place in the result.

    Args:
        rows: (heads,) pointers to their first elements.
        inside: (heads, DIM) elements that there are.
        weight: pointer to that of the norm.
        cos: pointer to those of the token, like sin.
    """
    place = tl.arange(0, DIM)
    rotated = place < 2 * pairs
    second = (place >= pairs) & rotated
    pair = tl.where(second, place - pairs, place)
    if INTERLEAVED:
        source = tl.where(rotated, 2 * pair + second.to(tl.int32), place)
        partner = tl.where(rotated, 2 * pair + 1 - second.to(tl.int32), place)
    else:
        source = place
        partner = tl.where(rotated, tl.where(second, pair, pair + pairs), place)
    values = tl.load(rows[:, None] + source[None, :], mask=inside, other=0.0).to(tl.float32)
    partners = values
    if ROTATE:
        partners = tl.load(rows[:, None] + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(values * values, 1) / dim + eps)[:, None]
        valid = place < dim
        values = values * factor * (tl.load(weight + source, mask=valid, other=0.0).to(tl.float32) + offset)[None, :]
        if ROTATE:
            partner_weight = tl.load(weight + partner, mask=valid, other=0.0).to(tl.float32)
            partners = partners * factor * (partner_weight + offset)[None, :]
    if ROTATE:
        cosine = tl.load(cos + pair, mask=rotated, other=1.0)
        sine = tl.load(sin + pair, mask=rotated, other=0.0)
        turned = values * cosine[None, :] + partners * tl.where(second, sine, -sine)[None, :]
        values = tl.where(rotated[None, :], turned, values)
    return values


@triton.jit
def norm_rope_kernel(
    x, out, cos, sin, q_weight, k_weight, token_stride, head_stride, heads, q_heads, dim, pairs, eps, offset,
    NORM: tl.constexpr, ROTATE: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """A program per token and tile of HEADS heads."""
    token = tl.program_id(0).to(tl.int64)
    is_query, head, stored = tile_heads(tl.program_id(1), q_heads, heads, HEADS)
    weight = k_weight
    if is_query:
        weight = q_weight
    place = tl.arange(0, DIM)
    inside = stored[:, None] & (place[None, :] < dim)
    values = norm_and_rotate(
        x + token * token_stride + head * head_stride, inside, weight, cos + token * pairs, sin + token * pairs,
        dim, pairs, eps, offset, NORM, ROTATE, INTERLEAVED, DIM,
    )  # fmt: skip
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
    return qk_norm_rope(x, x.shape[1], None, CosSin(cos, sin, interleaved))


def qk_norm_rope(x: Tensor, q_heads: int, norms: QKNormWeights | None, angles: CosSin | None) -> Tensor:
    """The heads of queries and then of keys, normed with the weights of either and rotated as by `apply_rope`.

    Args:
        x: (tokens, heads, dim) float32, float16 or bfloat16, last stride 1; the first `q_heads` are queries.

    Returns:
        as x, contiguous.
    """
    tokens, heads, dim = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    width = triton.next_power_of_2(dim)
    group = min(triton.next_power_of_2(heads), max(1, _ELEMENTS // width))
    tiles = triton.cdiv(q_heads, group) + triton.cdiv(heads - q_heads, group)
    norm_rope_kernel[(tokens, tiles)](
        x, out, token_stride=x.stride(0), head_stride=x.stride(1), heads=heads, q_heads=q_heads, dim=dim,
        **norm_and_rotate_arguments(x, norms, angles),
        HEADS=group, DIM=width, num_warps=4 if group * width >= _ELEMENTS else 1,
    )  # fmt: skip
    return out


def norm_and_rotate_arguments(x: Tensor, norms: QKNormWeights | None, angles: CosSin | None) -> dict[str, Any]:
    """The arguments of a kernel for `norm_and_rotate`; tensors that are not read are `x`."""
    cos, sin = (x, x) if angles is None else (angles.cos.contiguous(), angles.sin.contiguous())
    return {
        "cos": cos,
        "sin": sin,
        "q_weight": x if norms is None else norms.query,
        "k_weight": x if norms is None else norms.key,
        "pairs": 0 if angles is None else cos.shape[1],
        "eps": 0.0 if norms is None else norms.eps,
        "offset": 0.0 if norms is None else norms.offset,
        "NORM": norms is not None,
        "ROTATE": angles is not None,
        "INTERLEAVED": angles is not None and angles.interleaved,
    }


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
