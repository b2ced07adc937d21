"""Several hidden states of a token, of which a layer computes one (Baykal et al. 2023), and sparse activations.

References write sums over the few hidden states as sums of products, element by element, so that they do not depend on
how many tokens there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import native
from quire.kernels.capture import empty

_MAX_STREAMS = 8  # of the compiled kernels
_LEAST_SQUARE = 1e-5  # mean square of a hidden state before it is scaled


def match_size(x: Tensor, other: Tensor, out: Tensor | None = None) -> Tensor:
    """x with the root mean square of another hidden state; all are (tokens, hidden), their rows may have strides."""
    if native.supports(x, other):
        out = empty(x.shape, x.dtype) if out is None else out
        native.kernels.match_size(x=x, other=other, out=out, least_square=_LEAST_SQUARE)
        return out
    size = x.float().square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE)
    scaled = (x.float() * (other.float().square().mean(-1, keepdim=True) / size).sqrt()).to(x.dtype)
    return scaled if out is None else out.copy_(scaled)


def predict_streams(states: Tensor, logits: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Each hidden state plus a mix of all of them: the weight times tanh(logits * scale).

    Args:
        states: (tokens, count, hidden).
        logits: (tokens, count) float32.
        weight: (count * count, count), by the state that gets it, then by that which is read.
        scale: of the logits.
    """
    count = states.shape[1]
    if native.supports(states, weight) and states.is_contiguous() and count <= _MAX_STREAMS:
        out = empty(states.shape, states.dtype)
        native.kernels.predict_streams(states=states, logits=logits, weight=weight, out=out, scale=scale)
        return out
    mix = _products(_tanh(logits * scale), weight).unflatten(1, (count, count)).to(states.dtype)
    predicted = states
    for source in range(count):
        predicted = predicted + states[:, source, None] * mix[:, :, source, None]
    return predicted


def correct_streams(
    states: Tensor, computed: Tensor, logits: Tensor, weight: Tensor, active: int, scale: float
) -> Tensor:
    """Hidden states plus a part each of the difference between what a layer computed of the active one and that.

    Args:
        states: (tokens, count, hidden).
        computed: (tokens, hidden).
        logits: (tokens, count) float32.
        weight: (count, count); a part is 1 plus its product with tanh(logits * scale).
        active: index of the active one.
        scale: of the logits.
    """
    if _is_native(states, computed, weight):
        out = empty(states.shape, states.dtype)
        native.kernels.correct_streams(
            states=states, computed=computed, logits=logits, weight=weight, out=out, active=active, scale=scale
        )
        return out
    factors = (_products(_tanh(logits * scale), weight) + 1).to(computed.dtype)
    return states + (computed - states[:, active])[:, None] * factors[:, :, None]


def add_to_streams(states: Tensor, added: Tensor) -> None:
    """Add (tokens, hidden) to all hidden states (tokens, count, hidden) but the first, in place."""
    if native.supports(states, added) and states.is_contiguous() and added.is_contiguous():
        native.kernels.add_to_streams(states=states, added=added)
    else:
        states[:, 1:] += added[:, None]


def keep_largest(x: Tensor, deviations: float) -> None:
    """Subtract the mean of each row of x and so many deviations from it; what is negative then becomes 0. In place."""
    if native.supports(x):
        native.kernels.keep_largest(x=x, deviations=deviations)
        return
    values = x.float()
    mean = values.mean(-1, keepdim=True)
    deviation = (values - mean).square().mean(-1, keepdim=True).sqrt()
    x.copy_(torch.relu(values - (mean + deviation * deviations)))


def _is_native(states: Tensor, computed: Tensor, weight: Tensor) -> bool:
    if not native.supports(states, computed, weight) or not (states.is_contiguous() and computed.is_contiguous()):
        return False
    return states.shape[1] <= _MAX_STREAMS and states.shape[2] % native.LANES == 0


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
