"""The training recipe of quire-nano-see: sizes, mix of scenes, learning rates."""

from __future__ import annotations

from dataclasses import dataclass, field

SEED = 20_26


@dataclass(frozen=True)
class Shape:
    """Sizes of the model.

    Attributes:
        side: of a picture in pixels.
        patch: side of a patch of the tower.
        join: patches in a row, and in a column, that become one token of the decoder.
        text_tokens: of the tokenizer, before special tokens.
        positions: longest prompt and answer, in tokens.
    """

    side: int = 96
    patch: int = 8
    join: int = 2
    width: int = 192
    heads: int = 3
    tower_layers: int = 4
    tower_inner: int = 768
    decoder_layers: int = 4
    decoder_inner: int = 512
    text_tokens: int = 704
    positions: int = 1024

    @property
    def grid(self) -> int:
        """Patches in a row."""
        return self.side // self.patch

    @property
    def tokens(self) -> int:
        """Tokens of the decoder for a picture."""
        return (self.grid // self.join) ** 2


@dataclass(frozen=True)
class Recipe:
    """All settings that determine the result, besides phrases and drawings.

    Attributes:
        pictures: of a step.
        length: tokens of a sequence: a picture with as many questions as fit.
        tower_steps: steps before all others, which train the tower alone on crowded pictures: what each patch shows.
        crowds: pictures of such a step.
        reading_steps: steps behind them, in which the decoder learns to list what crowded pictures show.
        reading: share of such pictures later.
        easy: first steps with questions, whose pictures are clear and hold few things, and whose texts differ little.
        easy_mix: shares of the kinds of scenes in these steps.
        mix: shares of the kinds of scenes later.
        talk: share of sequences whose questions follow each other in one conversation; in others each sees the picture
            alone.
        system: share of sequences with a system message.
        without: share of sequences without a picture.
        patch_weight: of the loss on the tower's patches, which makes the first steps faster.
        rates: learning rates of the matrices and of the other parameters.
        decay_share: share of the steps over which the learning rates decay to 0.
    """

    seed: int = SEED
    shape: Shape = field(default_factory=Shape)
    steps: int = 8600
    tower_steps: int = 1500
    crowds: int = 32
    reading_steps: int = 800
    reading: float = 0.1
    pictures: int = 18
    length: int = 192
    easy: int = 200
    easy_mix: tuple[tuple[str, float], ...] = (("shapes", 0.45), ("counts", 0.15), ("number", 0.4))
    mix: tuple[tuple[str, float], ...] = (
        ("shapes", 0.2), ("counts", 0.48), ("number", 0.1), ("word", 0.11), ("chart", 0.11),
    )  # fmt: skip
    talk: float = 0.2
    system: float = 0.12
    without: float = 0.03
    patch_weight: float = 0.5
    rates: tuple[float, float] = (0.015, 2e-3)
    weight_decay: float = 0.02
    warmup: int = 50
    decay_share: float = 0.35
