"""Several hidden states of a token, of which a layer computes one: AltUp (Baykal et al. 2023), as in Gemma 3n."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.moe import Router
from quire.engine.models.layers.norm import make_norm
from quire.engine.models.specs.decoder import Norm, StackSpec
from quire.engine.models.specs.layer_inputs import Streams
from quire.kernels.add_scaled import add_scaled, scaled
from quire.kernels.capture import split_heads
from quire.kernels.copy_rows import contiguous_rows, join_columns
from quire.kernels.multiply import multiply
from quire.kernels.streams import correct_streams, match_size, predict_streams
from quire.kernels.take_rows import take_rows


class StreamEnds(nn.Module):
    """Projections from the first hidden state to the others before the layers, and back to one behind them."""

    def __init__(self, spec: Streams, hidden: int) -> None:
        super().__init__()
        self._count, self._hidden = spec.count, hidden
        self.expand = nn.ModuleList(Linear(hidden, hidden) for _ in range(1, spec.count))
        self.merge = nn.ModuleList(Linear(hidden, hidden) for _ in range(1, spec.count))

    def keep(self, *, expand: bool, merge: bool) -> None:
        """Keep the projections of one end, if the other is on another rank."""
        if not expand:
            self.expand = nn.ModuleList()
        if not merge:
            self.merge = nn.ModuleList()

    def expanded(self, x: Tensor) -> Tensor:
        """(tokens, hidden) to (tokens, count * hidden)."""
        return join_columns([x, *(match_size(project(x), x) for project in self.expand)])

    def merged(self, x: Tensor) -> Tensor:
        """(tokens, count * hidden) to (tokens, hidden): the mean of all."""
        first, *others = (contiguous_rows(part) for part in x.split(self._hidden, 1))
        total = first
        for project, other in zip(self.merge, others, strict=True):
            total = add_scaled(total, match_size(project(other), first))
        return scaled(total, 1 / self._count, rounded=False)


class LayerStreams(nn.Module):
    """What a layer does with the hidden states of a token before and behind its branches."""

    derived_from_weights = ("_output_scale",)  # made when first needed

    def __init__(self, spec: Streams, hidden: int, norm: Norm) -> None:
        super().__init__()
        self._spec, self._hidden, self._scale = spec, hidden, 1 / hidden
        self.router = Router(hidden, spec.count)
        self.router_norm = make_norm(hidden, norm)
        self.prediction = _parameter(spec.count**2, spec.count)
        self.correction = _parameter(spec.count, spec.count)
        self.output_scale = _parameter(hidden) if spec.scales_output else None
        self._output_scale: Tensor | None = None

    def predict(self, x: Tensor) -> Tensor:
        """(tokens, count * hidden), each hidden state plus a mix of all of them, to (tokens, count, hidden)."""
        states = split_heads(x, self._spec.count, self._hidden)
        return predict_streams(states, self._logits(self.active(states)), self.prediction, self._scale)

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """(tokens, count, hidden) with what the layer has computed (tokens, hidden) of the active one."""
        logits = self._logits(computed)
        return correct_streams(predicted, computed, logits, self.correction, self._spec.active, self._scale)

    def active(self, states: Tensor) -> Tensor:
        """(tokens, hidden) the active one of the hidden states (tokens, count, hidden), contiguous."""
        return contiguous_rows(states[:, self._spec.active])

    def rows(self, states: Tensor, indices: Tensor) -> Tensor:
        """Rows of the hidden states (tokens, count, hidden)."""
        return split_heads(take_rows(states.flatten(1), indices), self._spec.count, self._hidden)

    def scaled_active(self, states: Tensor) -> Tensor:
        """The active one with its learned factors."""
        active = self.active(states)
        if self.output_scale is None:
            return active
        if self._output_scale is None:
            self._output_scale = self.output_scale.float()
        return multiply(active, self._output_scale)

    def _logits(self, x: Tensor) -> Tensor:
        """(tokens, hidden) to (tokens, count) float32."""
        logits: Tensor = self.router.logits(self.router_norm(x))
        return logits


class SideBranch(nn.Module):
    """x plus the norm of two projections of it without anything between them (LAuReL, Menghani et al. 2024)."""

    def __init__(self, rank: int, model: StackSpec) -> None:
        super().__init__()
        self.a = Linear(model.hidden, rank)
        self.b = Linear(rank, model.hidden)
        self.norm = make_norm(model.hidden, model.norm)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, hidden) to the same."""
        return add_scaled(x, self.norm(self.b(self.a(x))))


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)
