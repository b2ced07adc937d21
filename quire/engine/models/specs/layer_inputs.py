"""What layers read of a token beside the hidden state, and streams of hidden states that a layer updates together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire.engine.models.specs.part import SpecPart


@dataclass(frozen=True, kw_only=True)
class LayerEmbeddings(SpecPart):
    """An input of each layer: the mean of an embedding of the token and a projection of the first hidden state.

    Both are scaled, and the projection is normalized (per-layer embeddings of Gemma 3n and 4).

    Attributes:
        size: elements of a layer's input.
        vocab: rows of the table of embeddings; tokens past them have that of token 0.
        item_token: the token whose embedding stands for those of pictures.
    """

    positive: ClassVar = ("size", "vocab")

    size: int
    vocab: int
    item_token: int = 0


@dataclass(frozen=True, kw_only=True)
class LayerInput(SpecPart):
    """x + norm(project(act(gate(x)) * input)), where `input` is that of the layer; see `LayerEmbeddings`."""

    positive: ClassVar = ("size",)
    activations: ClassVar = ("act",)

    size: int
    act: str


@dataclass(frozen=True, kw_only=True)
class Streams(SpecPart):
    """Several hidden states of a token, of which layers compute one and correct the others by it (AltUp).

    Attributes:
        count: hidden states of a token.
        active: index of the one that attention and feed-forward read.
        rank: elements between the two projections of the branch beside attention (LAuReL).
        scales_output: what the input of the layer is added to has learned factors.
    """

    positive: ClassVar = ("count", "rank")

    count: int
    active: int
    rank: int
    scales_output: bool
