"""ItemEncoder: encodes the items of a step and caches the keys and values that cross-attention reads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.engine.execution.attention.cross import pad_heads
from quire.engine.execution.attention.varlen import VarlenAttend
from quire.engine.execution.cache import KVCache
from quire.engine.models.audio_encoder import AudioEncoder
from quire.engine.models.decoder import Decoder
from quire.engine.scheduling.plan import CrossItem
from quire.kernels.paged_attention import write_pages


class ItemEncoder:
    """Runs the encoder of `model` and fills blocks of `cache`."""

    def __init__(self, model: Decoder, encoder: AudioEncoder, cache: KVCache, block_size: int) -> None:
        self._model = model
        self._encoder = encoder
        self._cache = cache
        self._block_size = block_size

    def encode(self, entries: Sequence[CrossItem]) -> None:
        """Encode the items of `entries`, all together, and write each one's keys and values to its blocks."""
        sample = self._encoder.sample
        features = [
            torch.tensor(entry.item.features, dtype=sample.dtype, device=sample.device)
            for entry in entries
            if entry.item is not None
        ]
        offsets = torch.tensor([0, *itertools.accumulate(entry.length for entry in entries)])
        encoded = self._encoder.run(features, VarlenAttend(offsets), offsets)
        self._write(encoded, torch.cat([self._slots(entry) for entry in entries]))

    def _slots(self, entry: CrossItem) -> Tensor:
        """(length,) int64 slot of each position."""
        self._cache.ensure_mapped(max(entry.blocks))
        size = self._block_size
        slots = torch.tensor(entry.blocks)[:, None] * size + torch.arange(size)
        return slots.flatten()[: entry.length]

    def _write(self, encoded: Tensor, slots: Tensor) -> None:
        for index, k, v in self._model.cross_keys_and_values(encoded):
            cache = self._cache.layers[index]
            k, v = pad_heads(k, cache.shape.key_elements), pad_heads(v, cache.shape.value_elements)
            write_pages(cache.keys, cache.values, slots, k, v)
