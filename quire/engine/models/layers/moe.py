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
from quire.engine.models.layers.norm import make_norm
from quire.engine.models.specs.decoder import (
    ClampedSwigluExperts,
    GatedExperts,
    GroupedSigmoidRouter,
    MoE,
    Norm,
    PlainExperts,
    SigmoidRouter,
    SoftmaxRouter,
)
from quire.kernels import native
from quire.kernels.activation import act_and_mul, activation, clamped_swiglu
from quire.kernels.add_scaled import add_scaled
from quire.kernels.capture import is_capturing
from quire.kernels.expert_calls import ExpertCalls, ExpertMemory
from quire.kernels.experts import can_stack, run_experts
from quire.kernels.gpu_weights import GpuWeight, StackedWeights, format_weight
from quire.kernels.linear import PackedWeight, Quantization, pack_exact_weight
from quire.kernels.multiply import gate_rows
from quire.kernels.routing import biased_softmax, grouped_sigmoid, sigmoid_top_k, softmax_top_k


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

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), which is written to `out` if given."""
        outputs: Tensor = self.down(_inner(self.gate_up(x), self.spec), out=out)
        return outputs


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


class BranchNorms(nn.Module):
    """The norms of a mixture of experts that reads hidden states without a norm; see `MoE.branch_norms`."""

    def __init__(self, hidden: int, norm: Norm) -> None:
        super().__init__()
        self.router, self.experts, self.shared = (make_norm(hidden, norm) for _ in range(3))
        self.experts_output, self.shared_output = (make_norm(hidden, norm) for _ in range(2))


class MoELayer(nn.Module):
    """Router, experts, and the shared expert if there is one."""

    float32_parameters: ClassVar = ("score_bias", "expert_scale")  # see `allocate` in `checkpoint/weights.py`

    def __init__(
        self,
        hidden: int,
        spec: MoE,
        group: RankGroup | None = None,
        norm: Norm | None = None,
        memory: ExpertMemory | None = None,
    ) -> None:
        """Make the layer.

        Args:
            hidden: inputs and outputs.
            spec: its architecture.
            group: ranks that have other experts, or other parts of each; the results are summed.
            norm: that of the model, if branches have norms of their own.
            memory: that of other layers; None: memory for this one alone.
        """
        super().__init__()
        self._group = group
        self.spec = spec
        router = spec.router
        self.router = Router(hidden, spec.experts, bias=isinstance(router, SoftmaxRouter) and router.bias)
        self.score_bias = _per_expert(spec.experts) if _has_score_bias(router) else None
        self.norms = BranchNorms(hidden, norm) if spec.branch_norms and norm is not None else None
        self.expert_scale = _per_expert(spec.experts) if spec.expert_scale else None
        count = len(spec.local_experts)
        self._stacks = StackedWeights(count), StackedWeights(count)
        self._biases: tuple[Tensor, Tensor] | None = None
        self._memory = memory or ExpertMemory(hidden)
        self._calls: ExpertCalls | None = None
        self._has_calls: bool | None = None  # whether the experts can be captured; None: not known yet
        self.experts = nn.ModuleList(Expert(hidden, spec, index, *self._stacks) for index in range(count))
        self.shared = _shared_expert(hidden, spec)
        self.shared_gate = Router(hidden, 1, bias=False) if spec.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, hidden) to (tokens, hidden)."""
        norms = self.norms
        if norms is None:
            out = self._run_experts(x, *self.route(x))
            return self._summed(out if self.shared is None else add_scaled(out, self._run_shared(x, self.shared)))
        experts = self._run_experts(norms.experts(x), *self.route(norms.router(x)))
        normed: Tensor = norms.experts_output(self._summed(experts))
        if self.shared is None:
            return normed
        return add_scaled(norms.shared_output(self._summed(self._run_shared(norms.shared(x), self.shared))), normed)

    def _summed(self, out: Tensor) -> Tensor:
        """The sum of the results of all ranks."""
        return out if self._group is None else self._group.all_reduce(out)

    def _run_experts(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if self._stacks[0].is_used:
            return self._run_stacked(x, chosen, weights)
        calls = self._captured(x)
        if calls is not None:
            return calls.run(x, chosen, weights, weighs_inputs=self.spec.weighs_inputs)
        return self._run(x, chosen, weights)

    def _captured(self, x: Tensor) -> ExpertCalls | None:
        """The calls of the experts, captured when first needed; None where they are more than compiled kernels."""
        if not native.supports(x):
            return None
        if self._has_calls is None and not is_capturing():
            experts = [expert.forward for expert in self.experts if isinstance(expert, Expert)]
            self._calls = ExpertCalls.capture(experts, self._memory, x.dtype, self.spec.local_experts.start)
            self._has_calls = self._calls is not None
        return self._calls

    def _run_shared(self, x: Tensor, shared: GatedMLPLayer | PlainMLPLayer) -> Tensor:
        out: Tensor = shared(x)
        return out if self.shared_gate is None else gate_rows(out, self.shared_gate.logits(x))

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
            return softmax_top_k(
                logits,
                top_k,
                renormalize=router.renormalize,
                groups=router.groups,
                top_groups=router.top_groups,
                expert_scale=self.expert_scale,
                scale=router.scale,
            )
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


def _per_expert(experts: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(experts), requires_grad=False)
