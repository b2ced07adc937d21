"""Layers with linear recurrences. Each is whole on every rank."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from quire.engine.models.distributed.group import RankGroup
from quire.engine.models.layers.delta_net import GateLinear
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.norm import RMSNorm
from quire.engine.models.layers.state_space import CausalConv
from quire.engine.models.layers.step import StepContext
from quire.engine.models.specs.decoder import StackSpec
from quire.engine.models.specs.linear_recurrence import DecayingAttention, GatedLinearRecurrence
from quire.kernels.activation import activation
from quire.kernels.capture import RowKind, set_row_kind, split_heads
from quire.kernels.copy_rows import contiguous_rows, join_columns
from quire.kernels.linear_recurrence import gated_linear_recurrence
from quire.kernels.multiply import multiply
from quire.kernels.output_gate import sigmoid_gate
from quire.kernels.state_parameters import HeadParameters
from quire.kernels.state_space_scan import state_space_scan
from quire.kernels.take_rows import take_rows


class LinearRecurrenceLayer(nn.Module):
    """A gated linear recurrence; see `GatedLinearRecurrence`.

    Attributes:
        gates: of each block of channels, the projection to the gates of inputs, then of decays.
        rate: logarithm of a channel's decay where its gate is 1, times -1.
    """

    float32_parameters: ClassVar = ("rate",)  # see `allocate` in `checkpoint/weights.py`

    def __init__(
        self, index: int, spec: GatedLinearRecurrence, model: StackSpec, group: RankGroup | None = None
    ) -> None:
        """`group` is not read."""
        super().__init__()
        self.index, self.spec = index, spec
        self.block = spec.size // spec.blocks
        self.gate = Linear(model.hidden, spec.size, bias=True)
        self.inputs = Linear(model.hidden, spec.size, bias=True)
        self.conv = CausalConv([spec.size], spec.width, bias=True, silu=False)
        self.gates = nn.ModuleList(
            GateLinear(self.block, self.block, self.block, bias=True) for _ in range(spec.blocks)
        )
        self.rate = nn.Parameter(torch.empty(spec.size), requires_grad=False)
        self.out = Linear(spec.size, model.hidden, bias=True)

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), or to (len(logits_indices), hidden); see `StepAttention`."""
        assert step.states is not None
        assert step.positions is not None
        inputs, channels = step.states.arrays(self.index)
        value = self.conv(self.inputs(x), step.states, inputs)
        y = gated_linear_recurrence(
            value,
            self._gates(value),
            self.rate,
            step.positions,
            channels,
            step.states.slots,
            step.states.cu_seqlens,
            self.block,
        )
        if last_layer and step.last_token_only and step.logits_indices is not None:
            set_row_kind(RowKind.LOGITS)  # of all later calls of the step
            x, y = take_rows(x, step.logits_indices), take_rows(y, step.logits_indices)
        out: Tensor = self.out(multiply(self.gate(x, act=self.spec.act), y))
        return out

    def _gates(self, value: Tensor) -> Tensor:
        """Logits of gates (tokens, 2 * size) float32: of each block those of inputs, then those of decays."""
        blocks = [
            project(contiguous_rows(part), out_dtype=torch.float32)
            for project, part in zip(self.gates, value.split(self.block, 1), strict=True)
        ]
        return join_columns(blocks)


class DecayingAttentionLayer(nn.Module):
    """Linear attention with constant decays: a state space whose steps are all 1; see `DecayingAttention`."""

    def __init__(self, index: int, spec: DecayingAttention, model: StackSpec, group: RankGroup | None = None) -> None:
        """`group` is not read."""
        super().__init__()
        self.index, self.spec = index, spec
        self.inputs = Linear(model.hidden, spec.size, spec.size, spec.size)
        self.norm = RMSNorm(spec.size, spec.eps)
        self.gate = Linear(model.hidden, spec.size)
        self.out = Linear(spec.size, model.hidden)
        self._parameters_of_heads: HeadParameters | None = None

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), or to (len(logits_indices), hidden); see `StepAttention`."""
        assert step.states is not None
        spec = self.spec
        (memory,) = step.states.arrays(self.index)
        projected = activation(self.inputs(x), spec.act, in_place=True)
        queries, keys, values = projected.split(spec.size, 1)
        y = state_space_scan(
            split_heads(values, spec.heads, spec.head_dim),
            projected[:, : spec.heads],  # any numbers: both limits of steps are 1
            split_heads(keys, spec.heads, spec.head_dim),
            split_heads(queries, spec.heads, spec.head_dim),
            self._heads(x.device),
            memory,
            step.states.slots,
            step.states.cu_seqlens,
        ).flatten(1)
        if last_layer and step.last_token_only and step.logits_indices is not None:
            x, y = take_rows(x, step.logits_indices), take_rows(y, step.logits_indices)
        normed = split_heads(self.norm(y), spec.heads, spec.head_dim)
        gates = split_heads(self.gate(x), spec.heads, spec.head_dim)
        out: Tensor = self.out(sigmoid_gate(normed, gates).flatten(1))
        return out

    def _heads(self, device: torch.device) -> HeadParameters:
        if self._parameters_of_heads is None:
            rates = torch.tensor(self.spec.rates, dtype=torch.float32, device=device)
            zeros = torch.zeros_like(rates)
            self._parameters_of_heads = HeadParameters(rates, zeros, zeros, 1.0, 1.0)
        return self._parameters_of_heads
