"""How the FP8 weights of a checkpoint are scaled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fp8Scales:
    """How FP8 weights are scaled.

    Attributes:
        block: rows and columns that share a scale; None: one scale for all of a weight.
    """

    block: tuple[int, int] | None = (128, 128)
