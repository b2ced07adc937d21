"""Dense feed-forward layers."""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import Tensor, nn

from quire.engine.models.distributed.group import RankGroup
from quire.engine.models.layers.linear import Linear, LoRARows
from quire.engine.models.layers.parallel import keep_largest_over_ranks, row_parallel
from quire.kernels.activation import act_and_mul
from quire.kernels.add_scaled import scaled
from quire.kernels.multiply import scale_in_place
from quire.kernels.xielu import XieluNumbers, xielu


class GatedMLPLayer(nn.Module):
    """out_scale * down(act(gate_scale * gate(x)) * up(x))."""

    def __init__(
        self,
        hidden: int,
        size: int,
        act: str,
        *,
        bias: bool = False,
        down_bias: bool | None = None,
        gate_scale: float = 1.0,
        out_scale: float = 1.0,
        sparsity: float = 0.0,
        group: RankGroup | None = None,
    ) -> None:
        """Make the layer.

        Args:
            hidden: inputs and outputs.
            size: elements between the projections.
            act: activation.
            bias: the projections have a bias.
            down_bias: bias of the second projection; None: as `bias`.
            gate_scale: factor of what the activation reads.
            out_scale: factor of the result.
            sparsity: see `GatedMLP`.
            group: ranks that have other elements between the projections; the results are summed.
        """
        super().__init__()
        self.gate_up = Linear(hidden, size, size, bias=bias)
        self.down = row_parallel(size, hidden, group, bias=bias if down_bias is None else down_bias)
        self.act = act
        self._gate_scale, self._out_scale = gate_scale, out_scale
        self._deviations = NormalDist().inv_cdf(sparsity) if sparsity else None
        self._group = group

    def forward(self, x: Tensor, lora: LoRARows | None = None) -> Tensor:
        """(tokens, hidden) to (tokens, hidden). `lora`: see `Linear`."""
        gate_up: Tensor = self.gate_up(x, lora=lora)
        if self._gate_scale != 1.0:
            scale_in_place(gate_up[:, : self.gate_up.parts[0]], self._gate_scale)
        if self._deviations is not None:
            keep_largest_over_ranks(gate_up[:, : self.gate_up.parts[0]], self._deviations, self._group)
        out: Tensor = self.down(act_and_mul(gate_up, self.act), lora=lora)
        return scaled(out, self._out_scale)


class PlainMLPLayer(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, hidden: int, size: int, act: str, *, bias: bool = True, group: RankGroup | None = None) -> None:
        """`group`: see `GatedMLPLayer`."""
        super().__init__()
        self.up = Linear(hidden, size, bias=bias)
        self.down = row_parallel(size, hidden, group, bias=bias)
        self.act = act

    def forward(self, x: Tensor, lora: LoRARows | None = None) -> Tensor:
        """(tokens, hidden) to (tokens, hidden). `lora`: see `Linear`."""
        out: Tensor = self.down(self.up(x, act=self.act, lora=lora), lora=lora)
        return out


class LearnedMLPLayer(PlainMLPLayer):
    """down(xielu(up(x))); see `quire.kernels.xielu`.

    Attributes:
        alpha_p, alpha_n: the learned numbers, (1,) each.
        beta, eps: the same of numbers that are not learned; checkpoints have them, too.
    """

    derived_from_weights = ("_numbers",)  # made when first needed

    def __init__(self, hidden: int, size: int, *, group: RankGroup | None = None) -> None:
        """`group`: see `GatedMLPLayer`."""
        super().__init__(hidden, size, "linear", bias=False, group=group)
        self.alpha_p, self.alpha_n, self.beta, self.eps = (
            nn.Parameter(torch.empty(1), requires_grad=False) for _ in range(4)
        )
        self._numbers: XieluNumbers | None = None

    def forward(self, x: Tensor, lora: LoRARows | None = None) -> Tensor:
        """(tokens, hidden) to (tokens, hidden). `lora`: see `Linear`."""
        if self._numbers is None:
            self._numbers = XieluNumbers.learned(self.alpha_p, self.alpha_n, self.beta, self.eps)
        out: Tensor = self.down(xielu(self.up(x, lora=lora), self._numbers), lora=lora)
        return out
