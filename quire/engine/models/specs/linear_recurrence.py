"""Layers with linear recurrences: decays of channels that depend on the token, and constant decays of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire.engine.models.specs.cache import StateArray, StateCache
from quire.engine.models.specs.decoder import Recurrence


@dataclass(frozen=True, kw_only=True)
class GatedLinearRecurrence(Recurrence):
    """out(act(gate(x)) * lru(conv(input(x)))), where lru decays each channel and adds to it (Griffin, De et al. 2024).

    Decay and input of a channel have gates, which are projected from the channels of the same block (RG-LRU).

    Attributes:
        size: channels.
        blocks: blocks of channels.
        width: taps of the convolution.
        act: activation of the gate beside the recurrence.
    """

    description: ClassVar = "gated linear recurrences"
    positive: ClassVar = ("size", "blocks", "width")
    activations: ClassVar = ("act",)

    size: int
    blocks: int
    width: int
    act: str

    @property
    def cache(self) -> StateCache:
        """The last inputs of the convolution, and the channels."""
        arrays = StateArray((self.width - 1, self.size), "float32"), StateArray((self.size,), "float32")
        return StateCache(arrays)


@dataclass(frozen=True, kw_only=True)
class DecayingAttention(Recurrence):
    """Linear attention whose heads forget at constant rates (lightning attention, Qin et al. 2024), a norm and a gate.

    Attributes:
        rates: of each head: a token multiplies its state by e^-rate.
        act: activation of queries, keys and values.
        eps: of the norm, which is over all heads.
    """

    description: ClassVar = "linear attention with constant decays"
    positive: ClassVar = ("head_dim",)
    activations: ClassVar = ("act",)

    head_dim: int
    rates: tuple[float, ...]
    act: str
    eps: float

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.rates)

    @property
    def size(self) -> int:
        """Elements of all heads."""
        return self.heads * self.head_dim

    @property
    def cache(self) -> StateCache:
        """The sum of products of keys and values."""
        return StateCache((StateArray((self.heads, self.head_dim, self.head_dim), "float32"),))
