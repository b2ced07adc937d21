"""The encoder that runs every `AudioEncoderSpec`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quire.engine.models.inputs import Attend
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.stem import ChunkedConvStemLayer, ConvStemLayer
from quire.engine.models.layers.step import StepContext
from quire.engine.models.spec import AudioEncoderSpec, ConvStem, Projector
from quire.engine.models.stack import LayerStack
from quire.kernels.activation import activation


class AudioEncoder(LayerStack):
    """Stem, layers, pooling, projection; items lie one behind the other without padding."""

    def __init__(self, spec: AudioEncoderSpec) -> None:
        super().__init__(spec)
        self.spec = spec
        self.stem = (
            ConvStemLayer(spec.stem, spec.hidden, spec.max_positions)
            if isinstance(spec.stem, ConvStem)
            else ChunkedConvStemLayer(spec.stem, spec.hidden)
        )
        self.projector = None if spec.projector is None else ProjectorLayer(spec.projector, spec.hidden * spec.joined)

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        weight = self.norm.weight
        assert isinstance(weight, Tensor)
        return weight.dtype

    def stem_of(self, features: Tensor, columns: int) -> Tensor:
        """The stem's result for one item.

        Args:
            features: (channels, columns), and some columns more that convolutions may read.
            columns: how many are encoded.

        Returns:
            (positions, hidden)
        """
        out: Tensor = self.stem(features, columns)
        return out

    def run(self, stems: Sequence[Tensor], attend: Attend, cu_seqlens: Tensor) -> list[Tensor]:
        """Encode items.

        Args:
            stems: results of `stem_of`.
            attend: attention within each item.
            cu_seqlens: see `ModelInputs`.

        Returns:
            (tokens, size) of each item.
        """
        x = stems[0] if len(stems) == 1 else torch.cat(list(stems))
        x = self.run_layers(x, StepContext({}, attend, cu_seqlens=cu_seqlens), normed=False)
        lengths = [len(stem) for stem in stems]
        if self.spec.averaged > 1:
            parts = [_averaged(part, self.spec.averaged) for part in x.split(lengths)]
            lengths = [len(part) for part in parts]
            x = torch.cat(parts)
        x = self.norm(x)
        if self.spec.joined > 1:
            x = x.reshape(-1, self.spec.joined * x.shape[1])
            lengths = [length // self.spec.joined for length in lengths]
        return list((x if self.projector is None else self.projector(x)).split(lengths))


def _averaged(x: Tensor, count: int) -> Tensor:
    """Means of each `count` neighbouring rows; those left over are dropped."""
    groups: Tensor = x[: len(x) // count * count].unflatten(0, (-1, count))
    return groups.mean(1)


class ProjectorLayer(nn.Module):
    """See `Projector`."""

    def __init__(self, spec: Projector, size_in: int) -> None:
        super().__init__()
        sizes = (size_in, *spec.sizes)
        self.linears = nn.ModuleList(
            Linear(before, size, bias=spec.bias) for before, size in zip(sizes, spec.sizes, strict=False)
        )
        self.act = spec.act

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, size_in) to (tokens, last size)."""
        for index, linear in enumerate(self.linears):
            x = linear(activation(x, self.act, in_place=True) if index else x)
        return x
