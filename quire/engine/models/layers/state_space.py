"""Layers that read earlier tokens through convolutions and state spaces.

A rank has some of the channels or heads of a layer whose spec says that it is divided, and their states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.models.distributed.group import RankGroup
from quire.engine.models.layers.inputs import StepStates
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.norm import RMSNorm
from quire.engine.models.layers.parallel import normalize_over_ranks, row_parallel
from quire.engine.models.layers.step import StepContext
from quire.engine.models.specs.decoder import StackSpec
from quire.engine.models.specs.state_space import ChannelStateSpace, GatedNorm, HeadStateSpace, ShortConvolution
from quire.kernels.add_scaled import scaled
from quire.kernels.capture import RowKind, set_row_kind, split_heads
from quire.kernels.causal_conv import causal_conv
from quire.kernels.gated_rms_norm import gated_rms_norm
from quire.kernels.multiply import multiply
from quire.kernels.rms_norm import rms_norm
from quire.kernels.selective_scan import selective_scan
from quire.kernels.state_parameters import ChannelParameters, HeadParameters
from quire.kernels.state_space_scan import state_space_scan
from quire.kernels.take_rows import take_rows


class CausalConv(nn.Module):
    """A convolution of each channel with earlier tokens, and its activation."""

    def __init__(self, parts: Sequence[int], width: int, *, bias: bool, silu: bool) -> None:
        """`parts`: channels of different kinds."""
        super().__init__()
        channels = sum(parts)
        self.sections = {"weight": parts, "bias": parts}  # see `WeightShards`
        self.weight = nn.Parameter(torch.empty(width, channels), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(channels), requires_grad=False) if bias else None
        self.silu = silu

    def forward(
        self,
        x: Tensor,
        states: StepStates,
        state: Tensor,
        *,
        input_gate: Tensor | None = None,
        output_gate: Tensor | None = None,
    ) -> Tensor:
        """(tokens, channels) to the same; `state`, `input_gate`, `output_gate`: see `causal_conv`."""
        return causal_conv(
            x,
            self.weight.t(),
            self.bias,
            state,
            states.slots,
            states.cu_seqlens,
            activation="silu" if self.silu else None,
            input_gate=input_gate,
            output_gate=output_gate,
        )


class UnitNorm(nn.Module):
    """Root mean square norm without a weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self._dim, self._eps = dim, eps
        self._ones: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        if self._ones is None:
            self._ones = x.new_ones(self._dim)
        return rms_norm(x, self._ones, self._eps)


class ShortConvLayer(nn.Module):
    """A convolution between two gates; see `ShortConvolution`."""

    def __init__(self, index: int, spec: ShortConvolution, model: StackSpec, group: RankGroup | None = None) -> None:
        """`group`: the ranks that have some of the channels each, if the spec is that of a part."""
        super().__init__()
        self.index, self.size = index, spec.size
        self.inputs = Linear(model.hidden, spec.size, spec.size, spec.size, bias=spec.bias)
        self.conv = CausalConv((spec.size,), spec.width, bias=spec.bias, silu=False)
        self.out = row_parallel(spec.size, model.hidden, group if spec.ranks > 1 else None, bias=spec.bias)

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), or to (len(logits_indices), hidden); see `StepAttention`."""
        states = _states(step)
        (kept,) = states.arrays(self.index)
        before, after, value = self.inputs(x).split(self.size, 1)
        y = self.conv(value, states, kept, input_gate=before, output_gate=after)
        out: Tensor = self.out(_needed(y, step, last_layer=last_layer))
        return out


class ChannelStateSpaceLayer(nn.Module):
    """A state space of each channel; see `ChannelStateSpace`."""

    float32_parameters: ClassVar = ("rate", "step_bias", "skip")  # see `allocate` in `checkpoint/weights.py`

    def __init__(self, index: int, spec: ChannelStateSpace, model: StackSpec, group: RankGroup | None = None) -> None:
        """`group`: the ranks that have some of the channels each, if the spec is that of a part."""
        super().__init__()
        self.index, self.spec = index, spec
        self.inputs = Linear(model.hidden, spec.size, spec.size, bias=spec.bias)
        self.conv = CausalConv((spec.size,), spec.width, bias=spec.conv_bias, silu=True)
        divided = group if spec.ranks > 1 else None
        self.selection = row_parallel(spec.size, spec.rank + 2 * spec.state, divided)
        self.steps = Linear(spec.rank, spec.size)
        self.out = row_parallel(spec.size, model.hidden, divided, bias=spec.bias)
        self.rate = _parameter(spec.state, spec.size)
        self.sections = {"rate": (spec.size,)}  # see `WeightShards`
        self.step_bias, self.skip = _parameter(spec.size), _parameter(spec.size)

        def norm(size: int) -> nn.Module:
            if spec.norm_eps is None:
                return nn.Identity()
            return RMSNorm(size, spec.norm_eps) if spec.norm_weights else UnitNorm(size, spec.norm_eps)

        self.step_norm, self.write_norm, self.read_norm = norm(spec.rank), norm(spec.state), norm(spec.state)

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), or to (len(logits_indices), hidden); see `StepAttention`."""
        states, spec = _states(step), self.spec
        kept, memory = states.arrays(self.index)
        value, gate = self.inputs(x).split(spec.size, 1)
        value = self.conv(value, states, kept)
        steps, write, read = self.selection(value).split((spec.rank, spec.state, spec.state), 1)
        y = selective_scan(
            value,
            self.steps(self.step_norm(steps)),
            self.write_norm(write),
            self.read_norm(read),
            ChannelParameters(self.rate, self.step_bias, self.skip),
            memory,
            states.slots,
            states.cu_seqlens,
            gate=gate,
        )
        out: Tensor = self.out(_needed(y, step, last_layer=last_layer))
        return out


class HeadStateSpaceLayer(nn.Module):
    """A state space of each head; see `HeadStateSpace`."""

    float32_parameters: ClassVar = ("rate", "step_bias", "skip")

    def __init__(self, index: int, spec: HeadStateSpace, model: StackSpec, group: RankGroup | None = None) -> None:
        """`group`: the ranks that have some of the heads each, if the spec is that of a part."""
        super().__init__()
        self.index, self.spec = index, spec
        self.inputs = Linear(model.hidden, spec.size, *spec.parts, spec.heads, bias=spec.bias)
        self.conv = CausalConv(spec.parts, spec.width, bias=spec.conv_bias, silu=True)
        self._group = group if spec.ranks > 1 else None
        self.out = row_parallel(spec.size, model.hidden, self._group, bias=spec.out_bias)
        self.rate, self.step_bias, self.skip = (_parameter(spec.heads) for _ in range(3))
        self.norm = None if spec.norm is None else RMSNorm(spec.size, spec.norm.eps)
        self._scales: Tensor | None = None

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), or to (len(logits_indices), hidden); see `StepAttention`."""
        states, spec = _states(step), self.spec
        kept, memory = states.arrays(self.index)
        gate, value, steps = self._project(x).split((spec.size, spec.channels, spec.heads), 1)
        value = self.conv(value, states, kept)
        value, write, read = value.split(spec.parts, 1)
        y = state_space_scan(
            split_heads(value, spec.heads, spec.head_dim),
            steps,
            split_heads(write, spec.groups, spec.state),
            split_heads(read, spec.groups, spec.state),
            HeadParameters(self.rate, self.step_bias, self.skip, spec.shortest, spec.longest_step),
            memory,
            states.slots,
            states.cu_seqlens,
            gate=split_heads(gate, spec.heads, spec.head_dim) if self.norm is None else None,
        ).flatten(1)
        if spec.norm is not None and self.norm is not None:
            y = self._normed(y, gate, self.norm.weight, spec.norm)
        out: Tensor = self.out(_needed(y, step, last_layer=last_layer))
        return out

    def _normed(self, y: Tensor, gate: Tensor, weight: Tensor, norm: GatedNorm) -> Tensor:
        spec = self.spec
        if self._group is None or not spec.shares_group:
            return gated_rms_norm(y, gate, weight, spec.size // spec.groups, norm.eps, gate_first=norm.gate_first)
        factor = F.silu(gate.float())
        values = y.float() * factor if norm.gate_first else y.float()
        (normed,) = normalize_over_ranks([values], norm.eps, self._group)
        normed = normed.to(y.dtype).float() * weight.float()
        return (normed if norm.gate_first else normed * factor).to(y.dtype)

    def _project(self, x: Tensor) -> Tensor:
        spec = self.spec
        projected: Tensor = self.inputs(scaled(x, spec.input_scale, rounded=False))
        if all(scale == 1.0 for scale in spec.scales):
            return projected
        if self._scales is None:
            size = spec.groups * spec.state
            sizes = torch.tensor((spec.size, spec.size, size, size, spec.heads))
            scales = torch.tensor(spec.scales).repeat_interleave(sizes)
            self._scales = scales.to(projected).float()  # rounded to the dtype
        return multiply(projected, self._scales)


def _states(step: StepContext) -> StepStates:
    assert step.states is not None
    return step.states


def _needed(y: Tensor, step: StepContext, *, last_layer: bool) -> Tensor:
    """The rows of the step's tokens that are needed behind a layer."""
    if not (last_layer and step.last_token_only) or step.logits_indices is None:
        return y
    set_row_kind(RowKind.LOGITS)  # of all later calls of the step
    return take_rows(y, step.logits_indices)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)
