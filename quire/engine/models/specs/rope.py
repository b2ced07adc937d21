"""Rope: the parameters of rotary position embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire.engine.models.specs.part import SpecPart


@dataclass(frozen=True, kw_only=True)
class DynamicNtk(SpecPart):
    """RoPE whose base grows with the position beyond the trained length ("dynamic NTK")."""

    positive: ClassVar = ("theta", "factor", "trained_len")

    theta: float
    factor: float
    trained_len: int


@dataclass(frozen=True, kw_only=True)
class LongRope(SpecPart):
    """RoPE with other frequencies for sequences that are longer than those of the training."""

    positive: ClassVar = ("trained_len",)

    inv_freq: tuple[float, ...]
    trained_len: int


@dataclass(frozen=True, kw_only=True)
class Rope(SpecPart):
    """Rotary position embedding of the first `dim` elements of a head.

    Attributes:
        inv_freq: dim / 2 inverse frequencies, with the config's scaling applied.
        factor: multiplies cosine and sine (YaRN, LongRoPE).
        interleaved: rotates pairs of adjacent elements instead of pairs across the two halves.
        extension: replaces `inv_freq` beyond the trained length.
        axes: for each pair of elements, which of a token's three positions it is rotated by: 0 for time, 1 for height,
            2 for width (M-RoPE). Empty: tokens have one position.
    """

    positive: ClassVar = ("dim",)

    dim: int
    inv_freq: tuple[float, ...]
    factor: float = 1.0
    interleaved: bool = False
    extension: DynamicNtk | LongRope | None = None
    axes: tuple[int, ...] = ()
