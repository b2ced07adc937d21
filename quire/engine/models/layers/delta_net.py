"""Layers with the gated delta rule: Gated DeltaNet (Yang et al. 2024) and Kimi Delta Attention."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from quire.engine.models.distributed.group import RankGroup
from quire.engine.models.layers.linear import Linear, LoRARows
from quire.engine.models.layers.parallel import row_parallel
from quire.engine.models.layers.step import StepContext
from quire.engine.models.specs.decoder import StackSpec
from quire.engine.models.specs.delta_net import GatedDeltaNet
from quire.kernels.capture import RowKind, set_row_kind, split_heads
from quire.kernels.causal_conv import causal_conv
from quire.kernels.delta_gates import DeltaGates
from quire.kernels.gated_delta_rule import gated_delta_rule
from quire.kernels.gated_rms_norm import gated_rms_norm
from quire.kernels.linear import Quantization, pack_exact_weight
from quire.kernels.take_rows import take_rows


class GateLinear(Linear):
    """A projection to one number of each head. It is never quantized: it is small, and what states forget adds up."""

    is_exact = True

    @override
    def pack_weights(self, quantization: Quantization) -> None:
        if self.weight is not None:
            self.use(pack_exact_weight(self.weight))


class LowRank(nn.Module):
    """Two projections without anything between them."""

    def __init__(self, size_in: int, rank: int, size_out: int) -> None:
        super().__init__()
        self.a = Linear(size_in, rank)
        self.b = Linear(rank, size_out)

    def forward(self, x: Tensor, *, lora: LoRARows | None = None) -> Tensor:
        """(tokens, size_in) to (tokens, size_out)."""
        out: Tensor = self.b(self.a(x, lora=lora), lora=lora)
        return out


class DeltaNetLayer(nn.Module):
    """Projections, causal convolution, gated delta rule, gated norm, output projection.

    Attributes:
        conv: (width, channels) taps, the last one of the token itself.
        log_rate, decay_bias: see `DeltaGates`.
    """

    float32_parameters: ClassVar = ("log_rate", "decay_bias")  # see `allocate` in `checkpoint/weights.py`
    derived_from_weights = ("_gains",)  # made when first needed

    def __init__(self, index: int, spec: GatedDeltaNet, model: StackSpec, group: RankGroup | None = None) -> None:
        """`group`: the ranks that have some of the heads each; None, or not of a part: all of them are here."""
        super().__init__()
        self.index = index
        self.spec = spec
        values, keys = spec.heads * spec.value_dim, spec.heads * spec.key_dim
        self.qkv = Linear(model.hidden, *spec.parts)
        self.conv = _parameter(spec.width, sum(spec.parts))
        self.sections = {"conv": spec.parts}  # see `WeightShards`
        self.gates = GateLinear(model.hidden, *([spec.heads] * (2 if spec.rank is None else 1)))
        self.decay = None if spec.rank is None else LowRank(model.hidden, spec.rank, keys)
        self.z = Linear(model.hidden, values) if spec.rank is None else LowRank(model.hidden, spec.rank, values)
        self.log_rate = _parameter(spec.heads)
        self.decay_bias = _parameter(spec.heads if spec.rank is None else keys)
        self.norm = _parameter(spec.value_dim)
        self.out = row_parallel(values, model.hidden, group if spec.ranks > 1 else None)
        self._gains: Tensor | None = None

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), or to (len(logits_indices), hidden); see `StepAttention`."""
        assert step.states is not None
        spec, states, lora = self.spec, step.states, step.lora_rows(last_layer=False)
        inputs, state = states.arrays(self.index)
        qkv = self.qkv(x, lora=lora)
        convolved = causal_conv(qkv, self.conv.t(), None, inputs, states.slots, states.cu_seqlens, activation="silu")
        q, k, v = convolved.split(spec.parts, 1)
        written = gated_delta_rule(
            split_heads(q, spec.key_heads, spec.key_dim),
            split_heads(k, spec.key_heads, spec.key_dim),
            split_heads(v, spec.heads, spec.value_dim),
            self._gates(x, lora),
            state,
            states.slots,
            states.cu_seqlens,
        ).flatten(1)
        if last_layer and step.last_token_only and step.logits_indices is not None:
            set_row_kind(RowKind.LOGITS)  # of all later calls of the step
            x, written = take_rows(x, step.logits_indices), take_rows(written, step.logits_indices)
            lora = step.lora_rows(last_layer=True)
        if self._gains is None:
            self._gains = self.norm.repeat(spec.heads)
        normed = gated_rms_norm(
            written, self.z(x, lora=lora), self._gains, spec.value_dim, spec.eps, gate_first=False, gate_act=spec.gate
        )
        out: Tensor = self.out(normed, lora=lora)
        return out

    def _gates(self, x: Tensor, lora: LoRARows | None) -> DeltaGates:
        heads, gates = self.spec.heads, self.gates(x)
        decay = gates[:, heads:] if self.decay is None else self.decay(x, lora=lora)
        return DeltaGates(
            split_heads(decay, heads, decay.shape[1] // heads),
            gates[:, :heads],
            self.log_rate,
            self.decay_bias.view(heads, -1),
            self.spec.most_beta,
        )


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)
