"""Mixtures of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.mlp import GatedMLPLayer
from quire.engine.models.parallel.group import RankGroup
from quire.engine.models.spec import ClampedSwigluExperts, GatedExperts, GroupedSigmoidRouter, MoE, SoftmaxRouter
from quire.kernels.activation import act_and_mul, clamped_swiglu
from quire.kernels.linear import Quantization


class Expert(nn.Module):
    """One expert: a gated feed-forward. Its weights are packed as soon as they are loaded, expert by expert."""

    def __init__(self, hidden: int, spec: MoE) -> None:
        super().__init__()
        self.spec = spec.expert
        bias = isinstance(spec.expert, ClampedSwigluExperts)
        self.gate_up = Linear(hidden, spec.size, spec.size, bias=bias)
        self.down = Linear(spec.size, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, hidden) to (tokens, hidden)."""
        gate_up = self.gate_up(x)
        if isinstance(self.spec, ClampedSwigluExperts):
            inner = clamped_swiglu(gate_up, self.spec.alpha, self.spec.limit)
        else:
            inner = act_and_mul(gate_up, self.spec.act)
        out: Tensor = self.down(inner)
        return out


class Router(Linear):
    """Logits of experts in float32, from a weight that is never quantized.

    The compiled kernel sums in the same order however many tokens a step has; torch's product in float32 does not.
    """

    @override
    def pack_weights(self, quantization: Quantization) -> None:
        super().pack_weights("none")

    def logits(self, x: Tensor) -> Tensor:
        """(tokens, hidden) to (tokens, experts)."""
        if self.packed is not None:
            return self.packed(x, self.bias, out_dtype=torch.float32)
        assert self.weight is not None
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.float(), bias)


class MoELayer(nn.Module):
    """Router, experts, and the shared expert if there is one."""

    def __init__(self, hidden: int, spec: MoE, group: RankGroup | None = None) -> None:
        """`group`: ranks that have other experts, or other parts of each; the results are summed."""
        super().__init__()
        self._group = group
        self.spec = spec
        router = spec.router
        self.router = Router(hidden, spec.experts, bias=isinstance(router, SoftmaxRouter) and router.bias)
        self.score_bias = _score_bias(spec.experts) if isinstance(router, GroupedSigmoidRouter) else None
        self.experts = nn.ModuleList(Expert(hidden, spec) for _ in spec.local_experts)
        self.shared = _shared_expert(hidden, spec)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, hidden) to (tokens, hidden)."""
        chosen, weights = self.route(x)
        out = torch.zeros_like(x)
        local = self.spec.local_experts
        for index in chosen.unique().tolist():
            if index in local:
                tokens, rank = (chosen == index).nonzero(as_tuple=True)
                expert = self.experts[index - local.start]
                out.index_add_(0, tokens, expert(x[tokens]) * weights[tokens, rank, None].to(x.dtype))
        out = out if self.shared is None else out + self.shared(x)
        return out if self._group is None else self._group.all_reduce(out)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Indices and weights of each token's experts, both (tokens, top_k)."""
        logits = self.router.logits(x)
        router = self.spec.router
        if isinstance(router, GroupedSigmoidRouter):
            assert self.score_bias is not None
            return grouped_sigmoid(logits, self.score_bias, router, self.spec.top_k)
        weights, chosen = logits.softmax(-1).topk(self.spec.top_k, -1)
        return chosen, weights / weights.sum(-1, keepdim=True) if router.renormalize else weights


def grouped_sigmoid(logits: Tensor, bias: Tensor, router: GroupedSigmoidRouter, top_k: int) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3's router: the bias affects which experts are chosen, but not their weights."""
    scores = logits.sigmoid()
    grouped = (scores + bias).unflatten(-1, (router.groups, -1))
    best = grouped.topk(2, -1).values.sum(-1).topk(router.top_groups, -1).indices
    kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, value=True)
    chosen = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2).topk(top_k, -1).indices
    weights = scores.gather(-1, chosen)
    if router.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * router.scale


def _shared_expert(hidden: int, spec: MoE) -> GatedMLPLayer | None:
    act = spec.expert.act if isinstance(spec.expert, GatedExperts) else "silu"
    return GatedMLPLayer(hidden, spec.shared, act) if spec.shared else None


def _score_bias(experts: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(experts), requires_grad=False)
