"""Parts of an AudioEncoderSpec: stems, position embeddings and projectors.

As in `spec`, fields describe operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from quire.engine.client.convolutions import Convolution
from quire.engine.models.specs.cache import StateArray, StateCache, StateDtype
from quire.engine.models.specs.part import SpecPart


@dataclass(frozen=True, kw_only=True)
class ConvStem(SpecPart):
    """Two convolutions over time of width 3, each followed by `act`; the second one halves the number of positions.

    Attributes:
        channels: elements of a column of features.
        act: an activation.
    """

    positive: ClassVar = ("channels",)
    activations: ClassVar = ("act",)

    channels: int
    act: str

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """The convolutions over time, from which `count_positions` derives the length of the result."""
        return Convolution(3, 1, 1), Convolution(3, 2, 1)


@dataclass(frozen=True, kw_only=True)
class CausalConvStem(SpecPart):
    """As `ConvStem`, but the convolutions are causal: no position reads later ones, and zeros precede the first one.

    Attributes:
        channels: channels of a column of features.
        act: activation after each convolution.
    """

    positive: ClassVar = ("channels",)
    activations: ClassVar = ("act",)

    channels: int
    act: str

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """A convolution with as many positions, for an even number of columns."""
        return (Convolution(2, 2),)

    def state(self, hidden: int, dtype: StateDtype) -> StateCache:
        """Return what it keeps: the last columns, and the last position of the first convolution's output.

        `hidden`: elements of a position.
        """
        return StateCache((StateArray((2, self.channels), dtype), StateArray((1, hidden), dtype)))


@dataclass(frozen=True, kw_only=True)
class ChunkedConvStem(SpecPart):
    """Three convolutions over features and time, which halve both, each followed by `act`; then a projection.

    Each chunk of columns is computed by itself, and has its own sinusoidal positions.

    Attributes:
        rows: rows of the features.
        channels: outputs of each convolution.
        chunk: columns.
        act: an activation.
    """

    positive: ClassVar = ("rows", "channels", "chunk")
    activations: ClassVar = ("act",)

    rows: int
    channels: int
    chunk: int
    act: str

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """The convolutions of one chunk over time; see `count_positions`."""
        return (Convolution(3, 2, 1),) * 3


class StemNorm(Enum):
    """The values of an item that are normalized together."""

    POSITION = "the channels of each position"
    CHANNEL = "all positions of each channel"
    ALL = "all positions and channels"


@dataclass(frozen=True, kw_only=True)
class WaveConv(SpecPart):
    """A convolution over time without padding, a norm if there is one, and an activation.

    Attributes:
        size: channels of its result.
        norm_last: the norm follows the activation.
    """

    positive: ClassVar = ("size", "kernel", "stride")
    activations: ClassVar = ("act",)

    size: int
    kernel: int
    stride: int
    act: str
    bias: bool = False
    norm: StemNorm | None = None
    norm_last: bool = False


@dataclass(frozen=True, kw_only=True)
class WaveStem:
    """Convolutions over samples.

    Attributes:
        projection: a linear layer to the hidden size follows; otherwise the last convolution has that size.
        projection_norm: epsilon of a layer norm before it; None for no norm.
    """

    convs: tuple[WaveConv, ...]
    projection: bool = False
    projection_norm: float | None = None

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """The convolutions over time, from which `count_positions` derives the length of the result."""
        return tuple(Convolution(conv.kernel, conv.stride) for conv in self.convs)


@dataclass(frozen=True, kw_only=True)
class Conv2dStem(SpecPart):
    """Convolutions over time and bands of a spectrogram, each with a stride of 2 in both, then a linear layer.

    All but the first are separable: a convolution of each channel, and one of width 1. A relu follows each of them.

    Attributes:
        bands: rows of the features.
        channels: channels of all convolutions.
        layers: convolutions.
        kernel: width in both directions, an odd number.
        scale: factor of the result.
        standardized: each band is shifted and scaled before by numbers of the checkpoint.
    """

    positive: ClassVar = ("bands", "channels", "layers", "kernel")

    bands: int
    channels: int
    layers: int
    kernel: int = 3
    scale: float = 1.0
    standardized: bool = False

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """The convolutions over time, from which `count_positions` derives the length of the result."""
        return (Convolution(self.kernel, 2, self.kernel // 2),) * self.layers


@dataclass(frozen=True, kw_only=True)
class CausalConv2dStem(SpecPart):
    """As `Conv2dStem`, but no position reads columns after its last one: zeros precede the first column and band.

    A zero follows the last column and band of each convolution, which reads it if their number is even.

    Attributes:
        bands: rows of the features.
        channels: channels of all convolutions.
        layers: convolutions.
        kernel: width in both directions.
        scale: factor of the result.
    """

    positive: ClassVar = ("bands", "channels", "layers", "kernel")

    bands: int
    channels: int
    layers: int
    kernel: int = 3
    scale: float = 1.0

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """Convolutions over time with as many positions; see `count_positions`."""
        return (Convolution(2, 2, 1),) * self.layers

    @property
    def bands_of_layers(self) -> tuple[int, ...]:
        """The bands that each convolution reads, and those of the result."""
        bands = [self.bands]
        for _ in range(self.layers):
            bands.append(bands[-1] // 2 + 1)
        return tuple(bands)

    def state(self, dtype: StateDtype) -> StateCache:
        """Return what it keeps behind a number of columns that completes a position of the result.

        These are the last columns of each convolution's input: (channels, columns, bands).
        """
        channels = (1, *(self.channels,) * (self.layers - 1))
        shapes = zip(channels, self.bands_of_layers, strict=False)
        return StateCache(tuple(StateArray((count, self.kernel - 2, bands), dtype) for count, bands in shapes))


@dataclass(frozen=True, kw_only=True)
class LinearStem(SpecPart):
    """A linear layer over the rows of a column, with a bias: each column is a position."""

    positive: ClassVar = ("rows",)

    rows: int

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """None; see `count_positions`."""
        return ()


@dataclass(frozen=True, kw_only=True)
class LearnedPositions:
    """A learned vector for each position."""


@dataclass(frozen=True, kw_only=True)
class SinusoidalPositions:
    """Sines and cosines of each position, which no checkpoint has."""


@dataclass(frozen=True, kw_only=True)
class ConvPositions(SpecPart):
    """x + act(convolution(x)), whose channels are convolved in groups; see `LayerStack` for a norm after it.

    Attributes:
        kernel: positions; of an even number one more lies before the position than after it.
        norm: the model's norm follows the sum.
    """

    positive: ClassVar = ("kernel", "groups")
    activations: ClassVar = ("act",)

    kernel: int
    groups: int
    act: str
    norm: bool = False


@dataclass(frozen=True, kw_only=True)
class Projector(SpecPart):
    """Linear layers with `act` between them.

    Attributes:
        sizes: output size of each.
        bias: whether all of them have a bias.
    """

    activations: ClassVar = ("act",)

    sizes: tuple[int, ...]
    bias: bool
    act: str = "gelu"


@dataclass(frozen=True, kw_only=True)
class QueryProjector(SpecPart):
    """Learned queries that attend to each window of positions, and a linear layer (Q-Former, Li et al. 2023).

    A layer is self-attention of a window's queries, cross-attention to its positions in each `cross_every`-th layer,
    and a feed-forward, each with a norm after its sum. The last window is filled up with zeros, which are attended to.

    Attributes:
        window: number of positions of a window.
        queries: number of queries of a window, each of which becomes a token.
        source: elements of a position.
        hidden: elements of a query.
        layers: number of layers of the transformer.
        heads: number of heads of its attention.
        ffn, act: size and activation of its feed-forward.
        eps: epsilon of its norms.
        size: outputs of the linear layer.
    """

    positive: ClassVar = ("window", "queries", "hidden", "layers", "heads", "ffn", "cross_every", "size")
    activations: ClassVar = ("act",)

    window: int
    queries: int
    source: int
    hidden: int
    layers: int
    heads: int
    ffn: int
    act: str
    eps: float
    cross_every: int
    size: int


@dataclass(frozen=True, kw_only=True)
class RelativeAttention(SpecPart):
    """Attention with scores (q + u) k + (q + v) r, where r are keys of sinusoidal distances (Dai et al. 2019).

    Attributes:
        bias: whether the projections have one; that of distances never does.
    """

    positive: ClassVar = ("heads", "head_dim")

    heads: int
    head_dim: int
    scale: float
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class ChunkedAttention(SpecPart):
    """`RelativeAttention` of chunks of positions to themselves and to those before them (Noroozi et al. 2024).

    Attributes:
        chunk: number of positions of a chunk.
        past: number of positions before a chunk that it attends to, whole chunks.
    """

    positive: ClassVar = ("heads", "head_dim", "chunk")

    heads: int
    head_dim: int
    scale: float
    chunk: int
    past: int
    bias: bool = True

    def state(self, dtype: StateDtype) -> StateCache:
        """Return what it keeps: keys and values of the positions before a chunk."""
        array = StateArray((self.heads, self.past, self.head_dim), dtype)
        return StateCache((array, array))


@dataclass(frozen=True, kw_only=True)
class BlockAttention(SpecPart):
    """Attention within blocks of positions, with scores q k + q r, where r are learned by distance (Shaw et al. 2018).

    Attributes:
        block: positions.
        reach: rows of the table of distances are twice as many and one.
    """

    positive: ClassVar = ("heads", "head_dim", "block", "reach")

    heads: int
    head_dim: int
    scale: float
    block: int
    reach: int


@dataclass(frozen=True, kw_only=True)
class TimeConv(SpecPart):
    """The convolution of a conformer: values times gates, a convolution of each channel over time, `act`, a projection.

    Attributes:
        size: channels.
        kernel: positions that the convolution reads: half of them before its own, or all of them if it is `causal`. Of
            an even number one more lies before it than after it.
        act: activation before the last projection.
        gate: activation of the gates.
        bias: the projections have one.
        kernel_bias: the convolution has one.
        mixes: a linear layer precedes `act`, in place of a norm.
        norm: epsilon of a layer norm before `act`; None: the norm is a batch norm, by known statistics.
    """

    positive: ClassVar = ("size", "kernel")
    activations: ClassVar = ("act", "gate")

    size: int
    kernel: int
    act: str
    gate: str = "sigmoid"
    bias: bool = True
    kernel_bias: bool = True
    causal: bool = False
    mixes: bool = False
    norm: float | None = None

    def state(self, dtype: StateDtype) -> StateCache:
        """Return what it keeps if it is causal: the last positions that its convolution reads."""
        return StateCache((StateArray((self.kernel - 1, self.size), dtype),))


Stem = ConvStem | CausalConvStem | ChunkedConvStem | WaveStem | Conv2dStem | CausalConv2dStem | LinearStem
Positions = LearnedPositions | SinusoidalPositions | ConvPositions
