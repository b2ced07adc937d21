"""The training recipe of quire-nano-embed: sizes, the mix of themes, learning rates."""

from __future__ import annotations

from dataclasses import dataclass, field

SEED = 20_26
# Shares of the themes among the pairs.
MIX = {
    "quire_answer": 0.10, "quire_question": 0.07, "small_talk": 0.02, "tool_request": 0.13, "tool_wording": 0.05,
    "recall_question": 0.09, "recall_wording": 0.03, "record_question": 0.09, "record_wording": 0.04,
    "record_short": 0.04, "arithmetic": 0.05, "typo": 0.04, "other_words": 0.03, "keywords": 0.06, "topics": 0.09,
    "docs": 0.04, "word_class": 0.03,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    vocabulary: int = 8192
    width: int = 256
    layers: int = 4
    heads: int = 4
    inner: int = 768
    positions: int = 512
    norm_eps: float = 1e-12


@dataclass(frozen=True)
class Recipe:
    """All settings that determine the result, besides the word and phrase lists.

    Attributes:
        pairs: pairs of a step. All other texts of a step are wrong answers to a query, except those that fit it.
        chunk: pairs of one theme that follow one another in a step, so that some of the wrong answers are alike.
        length: longest training text in tokens; longer ones are cut.
        shift_rate: share of the groups of a step whose positions begin at a later one: all have to be trained.
        temperature: what cosines are divided by in the loss.
        dimensions: numbers of leading values that have to suffice by themselves (Matryoshka), the whole width first.
        rates: learning rates of the matrices and of the other parameters.
        decay_share: share of the steps over which the learning rates decay to 0.
    """

    seed: int = SEED
    shape: Shape = field(default_factory=Shape)
    steps: int = 1600
    pairs: int = 256
    chunk: int = 64
    length: int = 192
    shift_rate: float = 0.2
    temperature: float = 0.05
    dimensions: tuple[int, ...] = (256, 128, 64)
    rates: tuple[float, float] = (0.015, 2e-3)
    weight_decay: float = 0.02
    warmup: int = 60
    decay_share: float = 0.3
    mix: dict[str, float] = field(default_factory=lambda: dict(MIX))
