"""What a pipeline stage passes to the next one of each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.engine.models.layers.inputs import KeysAndValues
from quire.engine.models.sharding.shard import sources_before
from quire.engine.models.specs.cache import CacheShape
from quire.engine.models.specs.decoder import DecoderSpec
from quire.engine.models.specs.shared_block import any_reads_embedded


@dataclass(frozen=True, slots=True)
class PassedValues:
    """The values of tokens between two stages.

    Attributes:
        hidden: (tokens, streams * hidden).
        inputs: (tokens, layers * size) of the layers behind; see `LayerEmbeddings`. None: they have none.
        embedded: (tokens, hidden) the input of the model's first layer; None: the layers behind do not read it.
        stored: by index in the whole model, the keys and values that layers behind read.
    """

    hidden: Tensor
    inputs: Tensor | None
    embedded: Tensor | None
    stored: Mapping[int, KeysAndValues]

    def joined(self) -> Tensor:
        """One tensor (tokens, columns), which `PassedColumns.divided` divides."""
        parts = [part for part in (self.hidden, self.inputs, self.embedded) if part is not None]
        for pair in self.stored.values():
            parts += [pair.keys.flatten(1), pair.values.flatten(1)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


@dataclass(frozen=True, slots=True)
class PassedColumns:
    """The sizes of the values between two stages.

    Attributes:
        hidden: columns of hidden states.
        inputs: columns of inputs of layers.
        embedded: columns of the input of the model's first layer.
        stored: by index in the whole model, what a rank stores of a token.
    """

    hidden: int
    inputs: int
    embedded: int
    stored: Mapping[int, CacheShape]

    @classmethod
    def before(cls, spec: DecoderSpec, layer: int, caches: Mapping[int, CacheShape]) -> PassedColumns:
        """Return those before a layer of the whole model.

        Args:
            spec: the whole model.
            layer: the first of a stage.
            caches: what a rank stores of a token in each layer of the whole model.
        """
        streams = 1 if spec.streams is None else spec.streams.count
        inputs = 0 if spec.layer_embeddings is None else spec.layer_embeddings.size * (len(spec.layers) - layer)
        embedded = spec.hidden if any_reads_embedded(spec.layers[layer:]) else 0
        stored = {source: caches[source] for source in sources_before(spec, layer)}
        return cls(spec.hidden * streams, inputs, embedded, stored)

    @property
    def total(self) -> int:
        """All columns."""
        return sum(self._sizes())

    def divided(self, joined: Tensor) -> PassedValues:
        """Divide what another stage has joined."""
        hidden, inputs, embedded, *parts = joined.split(self._sizes(), 1)
        stored = dict[int, KeysAndValues]()
        for index, (source, shape) in enumerate(self.stored.items()):
            keys, values = (
                part.contiguous().unflatten(1, (shape.heads, -1)) for part in parts[2 * index : 2 * index + 2]
            )
            stored[source] = KeysAndValues(keys, values)
        return PassedValues(
            hidden.contiguous(),
            inputs.contiguous() if self.inputs else None,
            embedded.contiguous() if self.embedded else None,
            stored,
        )

    def _sizes(self) -> Sequence[int]:
        dims = [heads * dim for shape in self.stored.values() for heads, dim in _rows(shape)]
        return [self.hidden, self.inputs, self.embedded, *dims]


def _rows(shape: CacheShape) -> Sequence[tuple[int, int]]:
    """Heads and elements of keys, and those of values."""
    return [(shape.heads, shape.key_dim), (shape.heads, shape.value_dim)]
