"""Layers in the place of attention that read earlier tokens through convolutions and state spaces."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from typing_extensions import override

from quire.engine.models.specs.cache import StateArray, StateCache
from quire.engine.models.specs.decoder import Recurrence


@dataclass(frozen=True, kw_only=True)
class ShortConvolution(Recurrence):
    """out(c * conv(b * x)), where b, c and x are projections of the token (LFM2).

    Attributes:
        size: elements of each projection.
        width: taps of the convolution.
        bias: projections and the convolution have one.
        ranks: how many have a part each, of which this is one.
    """

    description: ClassVar = "short convolutions"
    positive: ClassVar = ("size", "width")

    size: int
    width: int
    bias: bool = False
    ranks: int = 1

    @override
    def divided(self, ranks: int) -> Self:
        return self if self.size % ranks else replace(self, size=self.size // ranks, ranks=ranks)

    @property
    def cache(self) -> StateCache:
        """The last inputs of the convolution."""
        return StateCache((StateArray((self.width - 1, self.size), "float32"),))


@dataclass(frozen=True, kw_only=True)
class ChannelStateSpace(Recurrence):
    """A state space of each channel behind a convolution, and a gate (Mamba).

    Attributes:
        size: channels.
        state: elements of a channel's state.
        rank: elements from which time steps are projected.
        width: taps of the convolution.
        bias: the projections from and to the hidden state have one.
        conv_bias: the convolution has one.
        norm_eps: what time steps are projected from, and what states are written and read with, is normalized; None: it
            is not.
        norm_weights: these norms have weights.
        ranks: how many have some of the channels each, of which this is one.
    """

    description: ClassVar = "state spaces of channels"
    positive: ClassVar = ("size", "state", "rank", "width")

    size: int
    state: int
    rank: int
    width: int
    bias: bool = False
    conv_bias: bool = True
    norm_eps: float | None = None
    norm_weights: bool = True
    ranks: int = 1

    @override
    def divided(self, ranks: int) -> Self:
        return self if self.size % ranks else replace(self, size=self.size // ranks, ranks=ranks)

    @property
    def cache(self) -> StateCache:
        """The last inputs of the convolution, and the states."""
        return StateCache(
            (
                StateArray((self.width - 1, self.size), "float32"),
                StateArray((self.state, self.size), "float32"),
            )
        )


@dataclass(frozen=True, kw_only=True)
class GatedNorm:
    """The norm of each group of heads, with a gate.

    Attributes:
        gate_first: the gate is multiplied before the norm; False: behind it.
    """

    eps: float
    gate_first: bool = True


@dataclass(frozen=True, kw_only=True)
class HeadStateSpace(Recurrence):
    """A state space of each head behind a convolution, and a gate (Mamba-2).

    Attributes:
        heads: number of heads.
        head_dim: elements of a head.
        state: elements that each element of a head is written to.
        groups: numbers of vectors with which heads write, and with which they read.
        width: taps of the convolution.
        bias: the projection of the hidden state has one.
        out_bias: the projection to the hidden state has one.
        conv_bias: the convolution has one.
        shortest, longest: limits of time steps.
        norm: None: there is only a gate.
        input_scale: factor of the hidden state.
        scales: factors of what is projected: gates, inputs, what heads write with and read with, and time steps.
        ranks: how many have some of the heads each, of which this is one.
        shares_group: all ranks have the vectors of the only group, whose norm is that of the elements of all of them.
    """

    description: ClassVar = "state spaces of heads"
    positive: ClassVar = ("heads", "head_dim", "state", "groups", "width")

    heads: int
    head_dim: int
    state: int
    groups: int
    width: int
    bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    shortest: float = 0.0
    longest: float | None = None
    norm: GatedNorm | None
    input_scale: float = 1.0
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    ranks: int = 1
    shares_group: bool = False

    @override
    def divided(self, ranks: int) -> Self:
        is_shared = self.groups == 1
        if self.heads % ranks or (self.groups % ranks and not is_shared):
            return self
        groups = 1 if is_shared else self.groups // ranks
        return replace(self, heads=self.heads // ranks, groups=groups, ranks=ranks, shares_group=is_shared)

    @property
    def size(self) -> int:
        """Elements of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Elements that are convolved."""
        return sum(self.parts)

    @property
    def parts(self) -> tuple[int, int, int]:
        """The elements that are convolved: inputs, what heads write with and what they read with."""
        return self.size, self.groups * self.state, self.groups * self.state

    @property
    def longest_step(self) -> float:
        """The limit of time steps, infinite if there is none."""
        return math.inf if self.longest is None else self.longest

    @property
    def cache(self) -> StateCache:
        """The last inputs of the convolution, and the states."""
        return StateCache(
            (
                StateArray((self.width - 1, self.channels), "float32"),
                StateArray((self.heads, self.state, self.head_dim), "float32"),
            )
        )
