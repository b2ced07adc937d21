"""Routers of mixtures of experts, and the sum of what a token's experts return; twins of `quire.kernels.routing`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.variants import KernelVariant

_SUMMED = 1024  # elements of a program that sums


@triton.jit
def _argmax(values, indices):
    """The largest value of a tensor (groups, size), and the lowest index that has it."""
    best = tl.max(tl.max(values, 1), 0)
    return best, tl.min(tl.min(tl.where(values == best, indices, 1 << 30), 1), 0)


@triton.jit
def route_kernel(
    logits, bias, chosen, weights, logits_stride, experts, size, scale,
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token; experts are (groups, size), in one group unless SIGMOID."""
    token = tl.program_id(0).to(tl.int64)
    groups, inner = tl.arange(0, GROUP_BLOCK), tl.arange(0, SIZE_BLOCK)
    indices = groups[:, None] * size + inner[None, :]
    inside = (groups < GROUPS)[:, None] & (inner < size)[None, :]
    values = tl.load(logits + token * logits_stride + indices, mask=inside, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-values))
        biased = tl.where(inside, scores + tl.load(bias + indices, mask=inside, other=0.0), -float("inf"))
        best = tl.max(biased, 1)
        place = tl.min(tl.where(biased == best[:, None], inner[None, :], 1 << 30), 1)
        second = tl.max(tl.where(inner[None, :] == place[:, None], -float("inf"), biased), 1)
        sums = tl.where(groups < GROUPS, best + second, -float("inf"))
        selected = groups < 0
        for _ in tl.static_range(TOP_GROUPS):
            top = tl.max(sums, 0)
            group = tl.min(tl.where(sums == top, groups, 1 << 30), 0)
            selected = selected | (groups == group)
            sums = tl.where(groups == group, -float("inf"), sums)
        left = tl.where(selected[:, None], biased, -float("inf"))
    else:
        exponentials = tl.exp(values - tl.max(tl.max(values, 1), 0))
        scores = exponentials / tl.sum(tl.sum(exponentials, 1), 0)
        left = tl.where(inside, scores, -float("inf"))
    places = tl.arange(0, K_BLOCK)
    picked, picked_weights = tl.zeros((K_BLOCK,), dtype=tl.int32), tl.zeros((K_BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        _, index = _argmax(left, indices)
        score = tl.sum(tl.sum(tl.where(indices == index, scores, 0.0), 1), 0)
        picked = tl.where(places == k, tl.minimum(index, experts - 1), picked)  # no index is found among NaN
        picked_weights = tl.where(places == k, score, picked_weights)
        left = tl.where(indices == index, -float("inf"), left)
    if RENORMALIZE:
        picked_weights /= tl.sum(picked_weights, 0) + (1e-20 if SIGMOID else 0.0)
    tl.store(chosen + token * TOP_K + places, picked, mask=places < TOP_K)
    tl.store(weights + token * TOP_K + places, picked_weights * scale, mask=places < TOP_K)


def _route(
    logits: Tensor, bias: Tensor | None, top_k: int, groups: int, top_groups: int, scale: float, *, renormalize: bool
) -> tuple[Tensor, Tensor]:
    tokens, experts = logits.shape
    chosen = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    if tokens:
        size = experts // groups
        route_kernel[(tokens,)](
            logits, logits if bias is None else bias, chosen, weights, logits.stride(0), experts, size, scale,
            SIGMOID=bias is not None, RENORMALIZE=renormalize, TOP_K=top_k, GROUPS=groups, TOP_GROUPS=top_groups,
            GROUP_BLOCK=triton.next_power_of_2(groups), SIZE_BLOCK=triton.next_power_of_2(size),
            K_BLOCK=triton.next_power_of_2(top_k), num_warps=1,
        )  # fmt: skip
    return chosen, weights


def softmax_top_k(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The experts with the highest logits (tokens, experts); of equal ones those with the lowest indices.

    Returns:
        indices int32 and softmax weights float32, both (tokens, top_k), the highest first.
    """
    return _route(logits, None, top_k, 1, 1, 1.0, renormalize=renormalize)


def grouped_sigmoid(
    logits: Tensor, bias: Tensor, top_k: int, *, groups: int, top_groups: int, scale: float, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3's router; see `quire.kernels.routing`. bias: (experts,) float32. Returns as `softmax_top_k`."""
    return _route(logits, bias, top_k, groups, top_groups, scale, renormalize=renormalize)


@triton.jit
def sum_pairs_kernel(x, chosen, out, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """One program per token and block of elements."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        exists = tl.load(chosen + token * TOP_K + k) >= 0
        total += tl.load(x + (token * TOP_K + k) * size + columns, mask=inside & exists, other=0.0).to(tl.float32)
    tl.store(out + token * size + columns, total.to(out.dtype.element_ty), mask=inside)


def sum_pairs(x: Tensor, chosen: Tensor) -> Tensor:
    """Sum what the experts of each token returned, in the order of `chosen`.

    Args:
        x: (tokens * top_k, size), contiguous; rows of pairs without an expert are not read.
        chosen: (tokens, top_k) integers, contiguous; -1: no expert.

    Returns:
        (tokens, size) of x's dtype.
    """
    (tokens, top_k), size = chosen.shape, x.shape[1]
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    if tokens:
        sum_pairs_kernel[(tokens, -(-size // _SUMMED))](x, chosen, out, size, TOP_K=top_k, BLOCK=_SUMMED)
    return out


_ROUTE = {
    "logits": "*fp32", "bias": "*fp32", "chosen": "*i32", "weights": "*fp32", "logits_stride": "i32", "experts": "i32",
    "size": "i32", "scale": "fp32",
}  # fmt: skip
VARIANTS = [
    KernelVariant(
        route_kernel, _ROUTE,
        {"SIGMOID": True, "RENORMALIZE": True, "TOP_K": 8, "GROUPS": 8, "TOP_GROUPS": 4, "GROUP_BLOCK": 8,
         "SIZE_BLOCK": 32, "K_BLOCK": 8}, num_warps=1,
    ),
    KernelVariant(
        route_kernel, _ROUTE,
        {"SIGMOID": False, "RENORMALIZE": True, "TOP_K": 8, "GROUPS": 1, "TOP_GROUPS": 1, "GROUP_BLOCK": 1,
         "SIZE_BLOCK": 128, "K_BLOCK": 8}, num_warps=1,
    ),
    KernelVariant(
        sum_pairs_kernel, {"x": "*bf16", "chosen": "*i32", "out": "*bf16", "size": "i32"},
        {"TOP_K": 8, "BLOCK": _SUMMED},
    ),
]  # fmt: skip
