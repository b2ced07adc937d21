"""Mixtures of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.models.layers.linear import Linear, Packable
from quire.engine.models.layers.mlp import GatedMLPLayer
from quire.engine.models.spec import ClampedSwigluExperts, GroupedSigmoidRouter, MoE, SoftmaxRouter
from quire.kernels.activation import act_and_mul, clamped_swiglu
from quire.kernels.linear import PackedWeight, Quantization, pack_weight


class Experts(Packable):
    """The weights of all experts, with or without biases: stacked, until each expert's take a form of their own."""

    def __init__(self, hidden: int, spec: MoE) -> None:
        super().__init__()
        self.expert = spec.expert
        biased = isinstance(spec.expert, ClampedSwigluExperts)
        self.gate_up: nn.Parameter | None = _stack(spec.experts, 2 * spec.size, hidden)
        self.down: nn.Parameter | None = _stack(spec.experts, hidden, spec.size)
        self.panels: list[tuple[PackedWeight, PackedWeight]] = []
        self.gate_up_bias = _stack(spec.experts, 2 * spec.size) if biased else None
        self.down_bias = _stack(spec.experts, hidden) if biased else None

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each token's chosen experts; chosen and weights are (tokens, top_k)."""
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            result = self._run(expert, x[tokens]) * weights[tokens, place, None].to(x.dtype)
            out.index_add_(0, tokens, result)
        return out

    def pack_weights(self, quantization: Quantization) -> None:
        """See `Packable`."""
        if self.gate_up is None or self.down is None:
            return
        panels = [
            (up, down)
            for up_weight, down_weight in zip(self.gate_up, self.down, strict=True)
            if (up := pack_weight(up_weight, quantization)) and (down := pack_weight(down_weight, quantization))
        ]
        if len(panels) < len(self.gate_up):
            return
        self.panels, self.gate_up, self.down = panels, None, None
        for bias in (self.gate_up_bias, self.down_bias):
            if bias is not None:
                bias.data = bias.data.float()

    @property
    def packed_bytes(self) -> int:
        """See `Packable`."""
        return sum(form.nbytes for pair in self.panels for form in pair)

    def _run(self, index: int, x: Tensor) -> Tensor:
        gate_up = self._project(x, index, 0, self.gate_up, self.gate_up_bias)
        if isinstance(self.expert, ClampedSwigluExperts):
            inner = clamped_swiglu(gate_up, self.expert.alpha, self.expert.limit)
        else:
            inner = act_and_mul(gate_up, self.expert.act)
        return self._project(inner, index, 1, self.down, self.down_bias)

    def _project(self, x: Tensor, index: int, which: int, weights: Tensor | None, biases: Tensor | None) -> Tensor:
        bias = None if biases is None else biases[index]
        if weights is None:
            return self.panels[index][which](x, bias)
        return F.linear(x, weights[index], bias)


class MoELayer(nn.Module):
    """Router, experts, and the shared expert if there is one."""

    def __init__(self, hidden: int, spec: MoE) -> None:
        super().__init__()
        self.spec = spec
        router = spec.router
        self.router = Linear(hidden, spec.experts, bias=isinstance(router, SoftmaxRouter) and router.bias, plain=True)
        self.score_bias = _stack(spec.experts) if isinstance(router, GroupedSigmoidRouter) else None
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


def _stack(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)
