"""What quire-nano is made of: sizes, phases, the mix of themes, rates."""

from __future__ import annotations

from dataclasses import dataclass, field

SEED = 20_26
PIECES = 3000
SPACED = 900


@dataclass(frozen=True)
class Phase:
    """A stretch of training: its share of the steps and the shares of the themes."""

    name: str
    share: float
    mix: dict[str, float]


FIRST = Phase(
    "first", 0.15,
    {"drill": 0.16, "few_tools": 0.28, "tools": 0.04, "recall": 0.14, "extract": 0.14, "quire": 0.09, "talk": 0.05,
     "arithmetic": 0.08, "arithmetic_direct": 0.02, "mixed": 0.0},
)  # fmt: skip
MAIN = Phase(
    "main", 0.85,
    {"drill": 0.05, "few_tools": 0.15, "tools": 0.19, "recall": 0.17, "extract": 0.13, "quire": 0.10, "talk": 0.06,
     "arithmetic": 0.07, "arithmetic_direct": 0.03, "mixed": 0.05},
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """All that decides the result, besides the word and phrase lists."""

    seed: int = SEED
    pieces: int = PIECES
    spaced: int = SPACED
    width: int = 256
    layers: int = 6
    heads: int = 4
    inner: int = 704
    steps: int = 6000
    tokens_per_step: int = 8192
    matrix_rate: float = 0.02
    other_rate: float = 3e-3
    weight_decay: float = 0.02
    warmup: int = 100
    decay_share: float = 0.35
    phases: tuple[Phase, ...] = field(default=(FIRST, MAIN))

    def phase_at(self, step: int) -> tuple[Phase, int]:
        """The phase of a step, and the phase's first step."""
        start = 0
        for phase in self.phases:
            stop = start + round(self.steps * phase.share)
            if step < stop or phase is self.phases[-1]:
                return phase, start
            start = stop
        raise ValueError("a recipe has at least one phase")
