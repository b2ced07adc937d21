"""GatedDeltaNet: layers with the gated delta rule, in the place of attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from typing_extensions import override

from quire.engine.models.specs.cache import StateArray, StateCache
from quire.engine.models.specs.decoder import Recurrence


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(Recurrence):
    """A causal convolution of queries, keys and values, the gated delta rule, and a norm with a gate.

    Attributes:
        key_heads: heads of queries and keys; neighbouring value heads share one.
        width: taps of the convolution.
        eps: added to the mean of squares by the norm.
        most_beta: the largest part of what a state has at a key that a token replaces; see `DeltaGates`.
        rank: inner size of the two projections that make decays, of which each element of keys has one, and of the two
            that make gates of the output (Kimi Linear). None: each head has one decay, and all projections are direct.
        gate: activation of the gates of the output.
        ranks: how many have some of the heads each, of which this is one.
    """

    description: ClassVar = "layers with the gated delta rule"
    positive: ClassVar = ("key_heads", "heads", "key_dim", "value_dim", "width")

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    width: int
    eps: float
    most_beta: float = 1.0
    rank: int | None = None
    gate: Literal["silu", "sigmoid"] = "silu"
    ranks: int = 1

    @override
    def divided(self, ranks: int) -> Self:
        if self.key_heads % ranks or self.heads % ranks:
            return self
        return replace(self, key_heads=self.key_heads // ranks, heads=self.heads // ranks, ranks=ranks)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.heads * self.value_dim

    @property
    def cache(self) -> StateCache:
        """The last inputs of the convolution, and what the delta rule has written."""
        return StateCache(
            (
                StateArray((self.width - 1, sum(self.parts)), "float32"),
                StateArray((self.heads, self.key_dim, self.value_dim), "float32"),
            )
        )
