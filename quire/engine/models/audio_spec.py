"""Parts of an AudioEncoderSpec: what makes positions of features, tells them apart, and projects the result.

As in `spec`, fields describe operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quire.engine.wire.convolutions import Convolution


@dataclass(frozen=True, kw_only=True)
class ConvStem:
    """Two convolutions over time of width 3, each followed by `act`; the second one halves the number of positions.

    Attributes:
        channels: of a column of features.
        act: an activation.
    """

    channels: int
    act: str

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """The convolutions over time, from which `count_positions` derives the length of the result."""
        return Convolution(3, 1, 1), Convolution(3, 2, 1)


@dataclass(frozen=True, kw_only=True)
class CausalConvStem:
    """As `ConvStem`, but no convolution reads what comes behind its position: zeros precede the first one.

    Attributes:
        channels: of a column of features.
        act: an activation.
    """

    channels: int
    act: str

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """What gives the same number of positions, of an even number of columns."""
        return (Convolution(2, 2),)


@dataclass(frozen=True, kw_only=True)
class ChunkedConvStem:
    """Three convolutions over features and time, which halve both, each followed by `act`; then a projection.

    Each chunk of columns is computed by itself, and has its own sinusoidal positions.

    Attributes:
        rows: of features.
        channels: outputs of each convolution.
        chunk: columns.
        act: an activation.
    """

    rows: int
    channels: int
    chunk: int
    act: str

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """Of one chunk; see `count_positions`."""
        return (Convolution(3, 2, 1),) * 3


class StemNorm(Enum):
    """The values of an item that are normalized together."""

    POSITION = "the channels of each position"
    CHANNEL = "all positions of each channel"
    ALL = "all positions and channels"


@dataclass(frozen=True, kw_only=True)
class WaveConv:
    """A convolution over time without padding, a norm if there is one, and an activation.

    Attributes:
        size: channels of its result.
        norm_last: the norm follows the activation.
    """

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
class GridStem:
    """Convolutions over time and bands of a spectrogram, each with a stride of 2 in both, then a linear layer.

    All but the first are separable: a convolution of each channel, and one of width 1. A relu follows each of them.

    Attributes:
        bands: rows of the features.
        channels: of all convolutions.
        layers: convolutions.
        kernel: width in both directions, an odd number.
        scale: of the result.
    """

    bands: int
    channels: int
    layers: int
    kernel: int = 3
    scale: float = 1.0

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """The convolutions over time, from which `count_positions` derives the length of the result."""
        return (Convolution(self.kernel, 2, self.kernel // 2),) * self.layers


@dataclass(frozen=True, kw_only=True)
class LearnedPositions:
    """A learned vector for each position."""


@dataclass(frozen=True, kw_only=True)
class ConvPositions:
    """x + act(convolution(x)), whose channels are convolved in groups; see `LayerStack` for a norm behind it.

    Attributes:
        kernel: positions; of an even number one more lies before the position than behind it.
        norm: the model's norm follows the sum.
    """

    kernel: int
    groups: int
    act: str
    norm: bool = False


@dataclass(frozen=True, kw_only=True)
class Projector:
    """Linear layers with `act` between them.

    Attributes:
        sizes: outputs of each.
        bias: of all of them.
    """

    sizes: tuple[int, ...]
    bias: bool
    act: str = "gelu"


Stem = ConvStem | CausalConvStem | ChunkedConvStem | WaveStem | GridStem
Positions = LearnedPositions | ConvPositions
