"""The encoder that runs every `AudioEncoderSpec`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.client.convolutions import count_positions
from quire.engine.models.layers.conformer import sinusoids
from quire.engine.models.layers.inputs import StepAttention, StepStates
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.norm import LayerNorm, RMSNorm, make_norm
from quire.engine.models.layers.positions import make_positions
from quire.engine.models.layers.query_projector import QueryProjectorLayer
from quire.engine.models.layers.relative_bias import RelativeBiasTable
from quire.engine.models.layers.rope import RopeTables, cos_sin
from quire.engine.models.layers.stem import make_stem
from quire.engine.models.layers.step import StepContext
from quire.engine.models.networks.stack import LayerStack
from quire.engine.models.specs.audio import (
    Conv2dStem,
    ConvPositions,
    ConvStem,
    Projector,
    QueryProjector,
    RelativeAttention,
)
from quire.engine.models.specs.cache import StateDtype
from quire.engine.models.specs.decoder import AudioEncoderSpec, ConformerLayer, CTCSpec, GroupedQueryAttention
from quire.engine.models.specs.rope import Rope
from quire.kernels.activation import activation
from quire.kernels.projected_heads import CosSin


class AudioEncoder(LayerStack):
    """Stem, layers, pooling, projection; items lie one behind the other without padding."""

    def __init__(self, spec: AudioEncoderSpec) -> None:
        super().__init__(spec)
        self.spec = spec
        self.stem = make_stem(spec.stem, spec.hidden)
        self.positions = make_positions(spec.positions, spec.max_positions, spec.hidden)
        normed = isinstance(spec.positions, ConvPositions) and spec.positions.norm
        self.positions_norm = make_norm(spec.hidden, spec.norm) if normed else nn.Identity()
        self.projector = _make_projector(spec)
        self.picture_projector = _make_projector(spec) if spec.picture_projector else None
        biased = [attn for attn in _grouped(spec) if attn.relative_bias is not None]
        self.relative_bias = None
        if biased and (bias := biased[0].relative_bias) is not None:
            self.relative_bias = RelativeBiasTable(bias, biased[0].heads)
        self._tables: RopeTables | None = None

    @property
    def sample(self) -> Tensor:
        """A parameter that is never packed: it has the dtype and the device of features."""
        return next(module.weight for module in self.modules() if isinstance(module, LayerNorm | RMSNorm))

    @property
    def state_dtype(self) -> StateDtype:
        """The dtype of what it keeps of audio that arrives in pieces."""
        return cast("StateDtype", str(self.sample.dtype).removeprefix("torch."))

    def embed(self, features: Tensor, columns: int, before: int = 0) -> Tensor:
        """The input of the layers for one item.

        Args:
            features: (channels, columns), and some columns more that convolutions may read.
            columns: number of columns that are encoded.
            before: number of columns before these, of the audio that the item continues.

        Returns:
            (positions, hidden). Those of an item that continues another one are filled up to `AudioEncoderSpec.chunk`.
        """
        stem = self.spec.stem
        if isinstance(stem, ConvStem):
            x = self.stem(features)[: count_positions(stem.convolutions, columns)]
        else:
            x = self.stem(features[:, : before + columns])
        if before:
            assert isinstance(stem, Conv2dStem)
            x = x[count_positions(stem.convolutions, before) :]
            x = F.pad(x, (0, 0, 0, self.spec.chunk - len(x)))
        embedded: Tensor = self.positions_norm(self.positions(x))
        return embedded

    def run(
        self,
        items: Sequence[Tensor],
        attend: StepAttention,
        cu_seqlens: Tensor,
        positions: Tensor | None = None,
        states: StepStates | None = None,
        chunk_mask: Tensor | None = None,
        beside_pictures: Sequence[bool] = (),
    ) -> list[Tensor]:
        """Encode items.

        Args:
            items: the result of `embed` for each item.
            attend: attention within each item.
            cu_seqlens: see `ModelInputs`.
            positions: (positions,) int64, of all items; None: each begins at 0.
            states: those of the layers, if the items are pieces of audio.
            chunk_mask: see `StepContext`.
            beside_pictures: which items are in prompts that have pictures as well; empty: none.

        Returns:
            (tokens, size) of each item.
        """
        lengths = [len(item) for item in items]
        distances = None
        if any(isinstance(layer.attn, RelativeAttention) for layer in self.spec.layers):
            longest = max(lengths)
            numbers = range(longest - 1, -longest, -1)
            distances = sinusoids(numbers, self.spec.hidden, items[0].dtype, items[0].device)
        step = StepContext(
            self._ropes(lengths, positions),
            attend,
            cu_seqlens=cu_seqlens,
            relative_bias=None if self.relative_bias is None else self.relative_bias(),
            relative_positions=distances,
            states=states,
            chunk_mask=chunk_mask,
        )
        x = self._encode(_concatenated(items), step)
        if self.spec.averaged > 1:
            parts = [_averaged(part, self.spec.averaged) for part in x.split(lengths)]
            lengths = [len(part) for part in parts]
            x = torch.cat(parts)
        x = self.norm(x)
        if self.spec.joined > 1:
            x = x.reshape(-1, self.spec.joined * x.shape[1])
            lengths = [length // self.spec.joined for length in lengths]
        if self.projector is not None and self.picture_projector is not None and any(beside_pictures):
            projectors = (self.picture_projector if beside else self.projector for beside in beside_pictures)
            return [projector(part) for projector, part in zip(projectors, x.split(lengths), strict=True)]
        if isinstance(self.projector, QueryProjectorLayer):
            return [self.projector(part) for part in x.split(lengths)]
        return list((x if self.projector is None else self.projector(x)).split(lengths))

    def _encode(self, x: Tensor, step: StepContext) -> Tensor:
        """The layers' output, behind the inputs of those that are concatenated."""
        if not self.spec.concatenated:
            return self.run_layers(x, step, normed=False)
        concatenated = []
        for index, layer in enumerate(self.layers):
            if index in self.spec.concatenated:
                concatenated.append(x)
            x = layer(x, step)
        return torch.cat((*concatenated, x), 1)

    def _ropes(self, lengths: Sequence[int], positions: Tensor | None) -> dict[Rope, CosSin]:
        """Cosines and sines of the positions of items."""
        layers = (layer for layer in self.spec.layers if not isinstance(layer, ConformerLayer))
        ropes = {layer.attn.rope for layer in layers if layer.attn.rope is not None}
        if not ropes:
            return {}
        device = self.sample.device
        if positions is not None:  # which may be large: a table would be
            return {rope: cos_sin(rope, positions.to(device)) for rope in ropes}
        if self._tables is None:
            self._tables = RopeTables(ropes, self.spec.max_positions, None, device)
        return self._tables.at(torch.cat([torch.arange(length, device=device) for length in lengths]))


def _grouped(spec: AudioEncoderSpec) -> list[GroupedQueryAttention]:
    return [layer.attn for layer in spec.layers if isinstance(layer.attn, GroupedQueryAttention)]


def _make_projector(spec: AudioEncoderSpec) -> nn.Module | None:
    match spec.projector:
        case Projector():
            return ProjectorLayer(spec.projector, spec.hidden * spec.joined)
        case QueryProjector():
            return QueryProjectorLayer(spec.projector)
        case None:
            return None


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Items one behind the other."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _averaged(x: Tensor, count: int) -> Tensor:
    """Means of each `count` neighbouring rows; those left over are dropped."""
    groups: Tensor = x[: len(x) // count * count].unflatten(0, (-1, count))
    return groups.mean(1)


class ProjectorLayer(nn.Module):
    """The linear layers of a `Projector`."""

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


class CTCModel(nn.Module):
    """An encoder of audio and a projection; see `CTCSpec`."""

    def __init__(self, spec: CTCSpec) -> None:
        super().__init__()
        self.spec = spec
        self.encoder = AudioEncoder(spec.encoder)
        self.head = Linear(spec.encoder.hidden, spec.vocab, bias=True)

    def run(self, items: Sequence[Tensor], attend: StepAttention, cu_seqlens: Tensor) -> list[Tensor]:
        """Logits (positions, vocab) float32 of each item; see `AudioEncoder.run`."""
        encoded = self.encoder.run(items, attend, cu_seqlens)
        logits: Tensor = self.head(_concatenated(encoded), out_dtype=torch.float32)
        return list(logits.split([len(item) for item in encoded]))
