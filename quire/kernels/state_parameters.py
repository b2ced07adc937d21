"""Parameters of state spaces, as their kernels read them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadParameters:
    """Parameters of each head, (heads,) float32.

    Attributes:
        rate: how fast a state decays: a step of length 1 multiplies it with e^-|rate|.
        bias: added to time steps, before their softplus.
        skip: factor of the head's inputs, which are added to its outputs.
        low, high: limits of time steps.
    """

    rate: Tensor
    bias: Tensor
    skip: Tensor
    low: float = 0.0
    high: float = math.inf


@dataclass(frozen=True, slots=True)
class ChannelParameters:
    """Parameters of each channel, float32.

    Attributes:
        rate: (size, channels) how fast states decay: a step of length 1 multiplies them with e^-|rate|.
        bias: (channels,), added to time steps, before their softplus.
        skip: (channels,), factor of the inputs, which are added to outputs.
    """

    rate: Tensor
    bias: Tensor
    skip: Tensor
