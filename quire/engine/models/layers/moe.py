"""Mixtures of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.mlp import GatedMLPLayer
from quire.engine.models.spec import ClampedSwigluExperts, GroupedSigmoidRouter, MoE, SoftmaxRouter
from quire.kernels.gated import act_and_mul, clamped_swiglu


class Experts(nn.Module):
    """The weights of all experts, stacked, with or without biases."""

    def __init__(self, hidden: int, spec: MoE) -> None:
        super().__init__()
        self.expert = spec.expert
        biased = isinstance(spec.expert, ClampedSwigluExperts)
        self.gate_up = nn.Parameter(torch.empty(spec.experts, 2 * spec.size, hidden), requires_grad=False)
        self.down = nn.Parameter(torch.empty(spec.experts, hidden, spec.size), requires_grad=False)
        self.gate_up_bias = _bias(spec.experts, 2 * spec.size) if biased else None
        self.down_bias = _bias(spec.experts, hidden) if biased else None

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each token's chosen experts; chosen and weights are (tokens, top_k)."""
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            result = self._run(expert, x[tokens]) * weights[tokens, place, None].to(x.dtype)
            out.index_add_(0, tokens, result)
        return out

    def _run(self, index: int, x: Tensor) -> Tensor:
        up_bias = None if self.gate_up_bias is None else self.gate_up_bias[index]
        down_bias = None if self.down_bias is None else self.down_bias[index]
        gate_up = F.linear(x, self.gate_up[index], up_bias)
        if isinstance(self.expert, ClampedSwigluExperts):
            inner = clamped_swiglu(gate_up, self.expert.alpha, self.expert.limit)
        else:
            inner = act_and_mul(gate_up, self.expert.act)
        return F.linear(inner, self.down[index], down_bias)


class MoELayer(nn.Module):
    """Router, experts, and the shared expert if there is one."""

    def __init__(self, hidden: int, spec: MoE) -> None:
        super().__init__()
        self.spec = spec
        router = spec.router
        self.router = Linear(hidden, spec.experts, bias=isinstance(router, SoftmaxRouter) and router.bias, plain=True)
        self.score_bias = _bias(spec.experts) if isinstance(router, GroupedSigmoidRouter) else None
        self.experts = Experts(hidden, spec)
        self.shared = GatedMLPLayer(hidden, spec.shared, "silu") if spec.shared else None

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, hidden) to (tokens, hidden)."""
        chosen, weights = self.route(x)
        out: Tensor = self.experts(x, chosen, weights)
        return out if self.shared is None else out + self.shared(x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Indices and weights of each token's experts, both (tokens, top_k)."""
        assert self.router.weight is not None
        bias = None if self.router.bias is None else self.router.bias.float()
        logits = F.linear(x.float(), self.router.weight.float(), bias)
        router = self.spec.router
        if isinstance(router, GroupedSigmoidRouter):
            assert self.score_bias is not None
            return grouped_sigmoid(logits, self.score_bias, router, self.spec.top_k)
        weights, chosen = logits.softmax(-1).topk(self.spec.top_k, -1)
        return chosen, weights / weights.sum(-1, keepdim=True) if router.renormalise else weights


def grouped_sigmoid(logits: Tensor, bias: Tensor, router: GroupedSigmoidRouter, top_k: int) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3's choice: the bias decides who is chosen, but not with what weight."""
    scores = logits.sigmoid()
    grouped = (scores + bias).unflatten(-1, (router.groups, -1))
    best = grouped.topk(2, -1).values.sum(-1).topk(router.top_groups, -1).indices
    kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, value=True)
    chosen = grouped.masked_fill(~kept[..., None], 0.0).flatten(-2).topk(top_k, -1).indices
    weights = scores.gather(-1, chosen)
    if router.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * router.scale


def _bias(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)
