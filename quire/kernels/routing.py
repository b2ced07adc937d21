"""Routers of mixtures of experts, and the sum of what a token's experts return."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import gpu, native
from quire.kernels.capture import empty
from quire.kernels.multiply import sigmoid

_MAX_EXPERTS, _MAX_CHOSEN = 1024, 32  # of the compiled kernel
_LEAST_SUM = 1e-20  # that sigmoids are divided by, so that weights of 0 are no NaN


def softmax_top_k(
    logits: Tensor,
    top_k: int,
    *,
    renormalize: bool,
    groups: int = 1,
    top_groups: int = 1,
    expert_scale: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The experts with the highest logits, and their softmax weights.

    Args:
        logits: (tokens, experts) float32.
        top_k: experts of a token.
        renormalize: the weights of the chosen experts sum to 1.
        groups: groups of neighbouring experts.
        top_groups: groups of a token, those with the highest logits.
        expert_scale: (experts,) float32, factors of the weights of each expert.
        scale: factor of the weights.

    Returns:
        indices (integers) and weights float32, both (tokens, top_k).
    """
    if _runs_natively(logits, top_k):
        return _choose(
            logits,
            top_k,
            expert_scale=expert_scale,
            groups=groups,
            top_groups=top_groups,
            renormalize=renormalize,
            scale=scale,
        )
    chosen, weights = _softmax(logits, top_k, renormalize, groups, top_groups)
    if expert_scale is not None:
        weights = weights * expert_scale[chosen]
    return chosen, weights if scale == 1.0 else weights * scale


def _softmax(logits: Tensor, top_k: int, renormalize: bool, groups: int, top_groups: int) -> tuple[Tensor, Tensor]:
    if groups > 1:
        return _grouped_softmax(logits, top_k, renormalize=renormalize, groups=groups, top_groups=top_groups)
    if gpu.supports(logits):
        from quire.kernels.triton import routing as kernel

        return kernel.softmax_top_k(logits, top_k, renormalize=renormalize)
    return reference_softmax(logits, top_k, renormalize=renormalize)


def _runs_natively(logits: Tensor, top_k: int) -> bool:
    return top_k <= _MAX_CHOSEN and logits.shape[1] <= _MAX_EXPERTS and native.supports(logits)


def _choose(
    logits: Tensor,
    top_k: int,
    *,
    bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    sigmoid: bool = False,
    groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = False,
    least_sum: float = 0.0,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The experts of tokens by the compiled kernel; it chooses by the logits, or by the sums of scores and bias."""
    chosen, weights = empty((len(logits), top_k), torch.int64), empty((len(logits), top_k), torch.float32)
    native.kernels.choose_experts(
        logits=logits,
        bias=bias,
        expert_scale=expert_scale,
        chosen=chosen,
        weights=weights,
        sigmoid=int(sigmoid),
        groups=groups,
        top_groups=top_groups,
        renormalize=int(renormalize),
        least_sum=least_sum,
        scale=scale,
    )
    return chosen, weights


def reference_softmax(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """`softmax_top_k` in torch."""
    weights, chosen = logits.softmax(-1).topk(top_k, -1)
    return chosen, weights / weights.sum(-1, keepdim=True) if renormalize else weights


def biased_softmax(
    logits: Tensor, bias: Tensor, top_k: int, *, least_sum: float, scale: float
) -> tuple[Tensor, Tensor]:
    """The experts with the highest sums of softmax and bias; their weights have no bias (ERNIE 4.5).

    Args:
        logits: (tokens, experts) float32.
        bias: (experts,) float32.
        top_k: experts of a token.
        least_sum: the softmax weights of chosen experts are divided by their sum, but by no less than this.
        scale: factor of the weights.

    Returns:
        as `softmax_top_k`.
    """
    if _runs_natively(logits, top_k):
        return _choose(logits, top_k, bias=bias, renormalize=True, least_sum=least_sum, scale=scale)
    probabilities = logits.softmax(-1)
    chosen = (probabilities + bias).topk(top_k, -1).indices
    weights = probabilities.gather(-1, chosen)
    return chosen, scale * weights / weights.sum(-1, keepdim=True).clamp(min=least_sum)


def sigmoid_top_k(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The experts with the highest logits, and the sigmoids of these, which do not sum to 1 (Llama 4).

    Args:
        logits: (tokens, experts) float32.
        top_k: experts of a token.

    Returns:
        as `softmax_top_k`.
    """
    if _runs_natively(logits, top_k):
        return _choose(logits, top_k, sigmoid=True)
    values, chosen = logits.topk(top_k, -1)
    return chosen, sigmoid(values)


def _grouped_softmax(
    logits: Tensor, top_k: int, *, renormalize: bool, groups: int, top_groups: int
) -> tuple[Tensor, Tensor]:
    grouped = logits.softmax(-1).unflatten(-1, (groups, -1))
    best = grouped.amax(-1).topk(top_groups, -1).indices
    selected = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, value=True)
    weights, chosen = grouped.masked_fill(~selected[..., None], 0.0).flatten(-2).topk(top_k, -1)
    return chosen, weights / weights.sum(-1, keepdim=True) if renormalize else weights


def grouped_sigmoid(
    logits: Tensor, bias: Tensor, top_k: int, *, groups: int, top_groups: int, scale: float, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3's router: the bias affects which experts are chosen, but not their weights.

    Args:
        logits: (tokens, experts) float32.
        bias: (experts,) float32.
        top_k: experts of a token.
        groups: groups of neighbouring experts, at least two in each.
        top_groups: groups of a token, those with the highest sums of their two highest scores.
        scale: factor of the weights.
        renormalize: the weights of the chosen experts sum to 1, before the factor.

    Returns:
        as `softmax_top_k`.
    """
    if _runs_natively(logits, top_k):
        return _choose(
            logits,
            top_k,
            bias=bias,
            sigmoid=True,
            groups=groups,
            top_groups=top_groups,
            renormalize=renormalize,
            least_sum=_LEAST_SUM,
            scale=scale,
        )
    if gpu.supports(logits, bias):
        from quire.kernels.triton import routing as kernel

        return kernel.grouped_sigmoid(
            logits, bias, top_k, groups=groups, top_groups=top_groups, scale=scale, renormalize=renormalize
        )
    return reference_sigmoid(
        logits, bias, top_k, groups=groups, top_groups=top_groups, scale=scale, renormalize=renormalize
    )


def reference_sigmoid(
    logits: Tensor, bias: Tensor, top_k: int, *, groups: int, top_groups: int, scale: float, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """`grouped_sigmoid` in torch."""
    scores = sigmoid(logits)
    grouped = (scores + bias).unflatten(-1, (groups, -1))
    best = grouped.topk(2, -1).values.sum(-1).topk(top_groups, -1).indices
    selected = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, value=True)
    chosen = grouped.masked_fill(~selected[..., None], -torch.inf).flatten(-2).topk(top_k, -1).indices
    weights = scores.gather(-1, chosen)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
    return chosen, weights * scale
