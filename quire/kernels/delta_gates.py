"""DeltaGates: decays and betas of the gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeltaGates:
    """What a token's state forgets, and how much of it the token changes.

    Attributes:
        decay: (tokens, heads, channels), the last two dimensions dense; channels: 1, or the elements of a key. The
            logarithm of a decay is -e^log_rate * softplus(decay + bias).
        beta: (tokens, heads), last stride 1; the part that is changed is most_beta * sigmoid(beta).
        log_rate: (heads,) float32.
        bias: (heads, channels) float32.
        most_beta: 2 where the part may exceed 1, which turns what the state has.
    """

    decay: Tensor
    beta: Tensor
    log_rate: Tensor
    bias: Tensor
    most_beta: float = 1.0
