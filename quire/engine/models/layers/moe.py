"""Mixtures of experts."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from quire.engine.models.distributed.group import RankGroup
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.mlp import GatedMLPLayer, PlainMLPLayer
from quire.engine.models.specs.decoder import (
    ClampedSwigluExperts,
    GatedExperts,
    GroupedSigmoidRouter,
    MoE,
    PlainExperts,
    SigmoidRouter,
    SoftmaxRouter,
)
from quire.kernels.activation import act_and_mul, activation, clamped_swiglu
from quire.kernels.experts import can_stack, run_experts
from quire.kernels.gpu_weights import GpuWeight, StackedWeights, format_weight
from quire.kernels.linear import PackedWeight, Quantization, pack_exact_weight
from quire.kernels.routing import biased_softmax, grouped_sigmoid, sigmoid, sigmoid_top_k, softmax_top_k


class ExpertLinear(Linear):
    """A projection of one expert. On GPUs its weight moves to the tensor of all experts once it is loaded."""

    def __init__(self, size_in: int, *parts: int, bias: bool, stack: StackedWeights, index: int) -> None:
        """`index`: the expert's, in `stack`."""
        super().__init__(size_in, *parts, bias=bias)
        self._stack = stack
        self._index = index
        self._is_stacked = False

    @override
    def pack_weights(self, quantization: Quantization) -> None:
        if self.weight is None or not can_stack(self.weight):
            super().pack_weights(quantization)
        else:
            self.use(GpuWeight(format_weight(self.weight, quantization)))

    @override
    def can_use(self, packed: PackedWeight) -> bool:
        if self.weight is None or not can_stack(self.weight):
            return super().can_use(packed)
        # one tensor with the inputs in their order: the products of all experts read the same rows
        groups = packed.data.groups if isinstance(packed, GpuWeight) else None
        return groups is not None and groups.order is None

    @override
    def use(self, packed: PackedWeight | None) -> None:
        if not isinstance(packed, GpuWeight):
            super().use(packed)
            return
        if not self._stack.accepts(packed.data):
            raise UnsupportedModel(
                f"the weights of a layer's experts are {self._stack.data.kind} and {packed.data.kind}: on GPUs all "
                "experts need the same format"
            )
        self._stack.put(self._index, packed.data)
        self._is_stacked = True
        self.weight = None

    @property
    @override
    def packed_bytes(self) -> int:
        return self._stack.nbytes_per_expert if self._is_stacked else super().packed_bytes


class Expert(nn.Module):
    """One expert: a feed-forward, whose projection before the activation is one weight, with a gate or without.

    Its weights are packed as soon as they are loaded, expert by expert.
    """

    def __init__(
        self, hidden: int, spec: MoE, index: int, gate_up_stack: StackedWeights, down_stack: StackedWeights
    ) -> None:
        super().__init__()
        self.spec = spec.expert
        bias = isinstance(spec.expert, ClampedSwigluExperts)
        parts = (spec.size,) if isinstance(spec.expert, PlainExperts) else (spec.size, spec.size)
        self.gate_up = ExpertLinear(hidden, *parts, bias=bias, stack=gate_up_stack, index=index)
        self.down = ExpertLinear(spec.size, hidden, bias=bias, stack=down_stack, index=index)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, hidden) to (tokens, hidden)."""
        out: Tensor = self.down(_inner(self.gate_up(x), self.spec))
        return out


def _inner(gate_up: Tensor, spec: GatedExperts | PlainExperts | ClampedSwigluExperts) -> Tensor:
    """(tokens, 2 * size) to (tokens, size); of plain experts (tokens, size) to the same."""
    if isinstance(spec, PlainExperts):
        return activation(gate_up, spec.act, in_place=True)
    if isinstance(spec, ClampedSwigluExperts):
        return clamped_swiglu(gate_up, spec.alpha, spec.limit)
    return act_and_mul(gate_up, spec.act)


class Router(Linear):
    """Logits of experts in float32, from a weight that is never quantized.

    Its kernels sum in the same order however many tokens a step has; torch's product in float32 does not.
    """

    is_exact = True

    @override
    def pack_weights(self, quantization: Quantization) -> None:
        if self.weight is not None:
            self.use(pack_exact_weight(self.weight))

    def logits(self, x: Tensor) -> Tensor:
        """(tokens, hidden) to (tokens, experts)."""
        if self.packed is not None:
            return self.packed(x, self.bias, out_dtype=torch.float32)
        assert self.weight is not None
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.float(), bias)


class MoELayer(nn.Module):
    """Router, experts, and the shared expert if there is one."""

    float32_parameters: ClassVar = ("score_bias",)  # see `allocate` in `checkpoint/weights.py`

    def __init__(self, hidden: int, spec: MoE, group: RankGroup | None = None) -> None:
        """`group`: ranks that have other experts, or other parts of each; the results are summed."""
        super().__init__()
        self._group = group
        self.spec = spec
        router = spec.router
        self.router = Router(hidden, spec.experts, bias=isinstance(router, SoftmaxRouter) and router.bias)
        self.score_bias = _score_bias(spec.experts) if _has_score_bias(router) else None
        count = len(spec.local_experts)
        self._stacks = StackedWeights(count), StackedWeights(count)
        self._biases: tuple[Tensor, Tensor] | None = None
        self.experts = nn.ModuleList(Expert(hidden, spec, index, *self._stacks) for index in range(count))
        self.shared = _shared_expert(hidden, spec)
        self.shared_gate = Router(hidden, 1, bias=False) if spec.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, hidden) to (tokens, hidden)."""
        chosen, weights = self.route(x)
        out = self._run_stacked(x, chosen, weights) if self._stacks[0].is_used else self._run(x, chosen, weights)
        out = out if self.shared is None else out + self._run_shared(x, self.shared)
        return out if self._group is None else self._group.all_reduce(out)

    def _run_shared(self, x: Tensor, shared: GatedMLPLayer | PlainMLPLayer) -> Tensor:
        out: Tensor = shared(x)
        return out if self.shared_gate is None else out * sigmoid(self.shared_gate.logits(x)).to(out.dtype)

    def _run(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Expert by expert, of those that some token has chosen."""
        out = torch.zeros_like(x)
        local = self.spec.local_experts
        for index in chosen.unique().tolist():
            if index in local:
                tokens, rank = (chosen == index).nonzero(as_tuple=True)
                expert, factors = self.experts[index - local.start], weights[tokens, rank, None].to(x.dtype)
                weighs_inputs = self.spec.weighs_inputs
                out.index_add_(0, tokens, expert(x[tokens] * factors) if weighs_inputs else expert(x[tokens]) * factors)
        return out

    def _run_stacked(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """All experts at once, without waiting for the device."""
        if self._biases is None and isinstance(self.spec.expert, ClampedSwigluExperts):
            self._biases = self._stack_biases("gate_up"), self._stack_biases("down")
        gate_up_bias, down_bias = self._biases or (None, None)
        run = partial(run_experts, gate_up_bias=gate_up_bias, down_bias=down_bias)
        inner, local = partial(_inner, spec=self.spec.expert), self._local(chosen)
        if not self.spec.weighs_inputs:
            return run(x, *self._stacks, inner, local, weights)
        ones = torch.ones_like(weights[:, :1])
        parts = (
            run(x * weights[:, rank, None].to(x.dtype), *self._stacks, inner, local[:, rank, None].contiguous(), ones)
            for rank in range(weights.shape[1])
        )
        return torch.stack(list(parts)).sum(0)

    def _local(self, chosen: Tensor) -> Tensor:
        """Indices among the experts of this rank; -1 for those of others."""
        local = self.spec.local_experts
        if len(local) == self.spec.experts:
            return chosen
        local_ids = chosen - local.start
        return local_ids.masked_fill((local_ids < 0) | (local_ids >= len(local)), -1)

    def _stack_biases(self, name: str) -> Tensor:
        """The biases of a projection of all experts: (experts, outputs). The experts' own become views of them."""
        linears = [expert.get_submodule(name) for expert in self.experts]
        biases = [linear.bias for linear in linears if isinstance(linear, Linear) and linear.bias is not None]
        stack = torch.stack([bias.data for bias in biases])
        for bias, row in zip(biases, stack, strict=True):
            bias.data = row
        return stack

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Indices and weights of each token's experts, both (tokens, top_k)."""
        logits = self.router.logits(x)
        router, top_k = self.spec.router, self.spec.top_k
        if isinstance(router, SigmoidRouter):
            return sigmoid_top_k(logits, top_k)
        if isinstance(router, SoftmaxRouter) and self.score_bias is not None:
            return biased_softmax(logits, self.score_bias, top_k, least_sum=router.least_sum, scale=router.scale)
        if isinstance(router, SoftmaxRouter):
            chosen, weights = softmax_top_k(
                logits, top_k, renormalize=router.renormalize, groups=router.groups, top_groups=router.top_groups
            )
            return chosen, weights if router.scale == 1.0 else weights * router.scale
        assert self.score_bias is not None
        return grouped_sigmoid(
            logits,
            self.score_bias,
            top_k,
            groups=router.groups,
            top_groups=router.top_groups,
            scale=router.scale,
            renormalize=router.renormalize,
        )


def _shared_expert(hidden: int, spec: MoE) -> GatedMLPLayer | PlainMLPLayer | None:
    if isinstance(spec.expert, PlainExperts):
        return PlainMLPLayer(hidden, spec.shared, spec.expert.act, bias=False) if spec.shared else None
    act = spec.expert.act if isinstance(spec.expert, GatedExperts) else "silu"
    return GatedMLPLayer(hidden, spec.shared, act) if spec.shared else None


def _has_score_bias(router: SoftmaxRouter | GroupedSigmoidRouter | SigmoidRouter) -> bool:
    return isinstance(router, GroupedSigmoidRouter) or (isinstance(router, SoftmaxRouter) and router.selection_bias)


def _score_bias(experts: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(experts), requires_grad=False)
