"""DualEncoderSpec: an encoder of texts and one of pictures, whose embeddings are compared (Radford et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire.engine.models.specs.part import SpecPart


@dataclass(frozen=True, kw_only=True)
class DualEncoderSpec(SpecPart):
    """Two encoders that transformers runs, each with a pooling and a projection of its own.

    Attributes:
        size: elements of an embedding.
        vocab: tokens of texts.
        max_positions: tokens of the longest text.
        layers: number of layers of both encoders together.
        pads: texts are padded to that length; the embedding is that of the last token.
        family: name of the family whose checkpoints have the weights.
    """

    positive: ClassVar = ("size", "vocab", "max_positions", "layers")

    size: int
    vocab: int
    max_positions: int
    layers: int
    pads: bool = False
    family: str = ""
