"""Several hidden states of a token, of which a layer computes one: AltUp (Baykal et al. 2023), as in Gemma 3n.

Sums over the few hidden states are written as sums of products, element by element, so that they do not depend on how
many tokens there are.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.moe import Router
from quire.engine.models.layers.norm import make_norm
from quire.engine.models.specs.decoder import Norm, StackSpec
from quire.engine.models.specs.layer_inputs import Streams
from quire.kernels.add_scaled import add_scaled

_LEAST_SQUARE = 1e-5  # mean square of a hidden state before it is scaled


class StreamEnds(nn.Module):
    """Projections from the first hidden state to the others before the layers, and back to one behind them."""

    def __init__(self, spec: Streams, hidden: int) -> None:
        super().__init__()
        self._count, self._hidden = spec.count, hidden
        self.expand = nn.ModuleList(Linear(hidden, hidden) for _ in range(1, spec.count))
        self.merge = nn.ModuleList(Linear(hidden, hidden) for _ in range(1, spec.count))

    def expanded(self, x: Tensor) -> Tensor:
        """(tokens, hidden) to (tokens, count * hidden)."""
        return torch.cat((x, *(_as_large(project(x), x) for project in self.expand)), 1)

    def merged(self, x: Tensor) -> Tensor:
        """(tokens, count * hidden) to (tokens, hidden): the mean of all."""
        first, *others = x.split(self._hidden, 1)
        total = first
        for project, other in zip(self.merge, others, strict=True):
            total = total + _as_large(project(other.contiguous()), first)
        mean: Tensor = total / self._count
        return mean


def _as_large(x: Tensor, other: Tensor) -> Tensor:
    """x with the root mean square of another hidden state; both are (tokens, hidden)."""
    size = x.float().square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE)
    return (x.float() * (other.float().square().mean(-1, keepdim=True) / size).sqrt()).to(x.dtype)


class LayerStreams(nn.Module):
    """What a layer does with the hidden states of a token before and behind its branches."""

    def __init__(self, spec: Streams, hidden: int, norm: Norm) -> None:
        super().__init__()
        self._spec, self._hidden = spec, hidden
        self.router = Router(hidden, spec.count)
        self.router_norm = make_norm(hidden, norm)
        self.prediction = _parameter(spec.count**2, spec.count)
        self.correction = _parameter(spec.count, spec.count)
        self.output_scale = _parameter(hidden) if spec.scales_output else None

    def predict(self, x: Tensor) -> Tensor:
        """(tokens, count * hidden), each hidden state plus a mix of all of them, to (tokens, count, hidden)."""
        count = self._spec.count
        states: Tensor = x.unflatten(1, (count, self._hidden))
        mix = _products(self._modalities(states[:, self._spec.active]), self.prediction)
        mix = mix.unflatten(1, (count, count)).to(x.dtype)  # by the state that gets it, then by that which is read
        predicted = states
        for source in range(count):
            predicted = predicted + states[:, source, None] * mix[:, :, source, None]
        return predicted

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """(tokens, count, hidden) with what the layer has computed (tokens, hidden) of the active one."""
        factors = (_products(self._modalities(computed), self.correction) + 1).to(computed.dtype)
        return predicted + (computed - predicted[:, self._spec.active])[:, None] * factors[:, :, None]

    def active(self, states: Tensor) -> Tensor:
        """(tokens, hidden) the active one of the hidden states (tokens, count, hidden), contiguous."""
        return states[:, self._spec.active].contiguous()

    def scaled_active(self, states: Tensor) -> Tensor:
        """The active one with its learned factors."""
        active = self.active(states)
        return active if self.output_scale is None else active * self.output_scale

    def _modalities(self, x: Tensor) -> Tensor:
        """(tokens, hidden) to (tokens, count) float32."""
        normed = cast("Tensor", self.router_norm(x.contiguous()))
        return _tanh(self.router.logits(normed) * self._hidden**-1.0)


def _products(x: Tensor, weight: Tensor) -> Tensor:
    """x (tokens, n) times a weight (m, n): (tokens, m) float32."""
    columns = weight.float()
    total = x[:, :1] * columns[:, 0]
    for index in range(1, x.shape[1]):
        total = total + x[:, index, None] * columns[:, index]
    return total


def _tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangents, whose bits do not depend on how many there are, as those of torch's own on CPUs."""
    return 1 - 2 / ((2 * x).exp() + 1)


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
