"""Encodes multimodal items: for cross-attention, or to replace the embeddings of placeholder tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quire.engine.execution.attention.cross import pad_heads
from quire.engine.execution.attention.varlen import VarlenAttend
from quire.engine.execution.cache import KVCache
from quire.engine.models.audio_encoder import AudioEncoder
from quire.engine.models.decoder import Decoder
from quire.engine.models.inputs import ItemEmbeddings
from quire.engine.scheduling.plan import CrossItem, EncodedItem, ItemPart
from quire.engine.wire.protocol import MediaItem
from quire.kernels.paged_attention import write_pages


def embed_items(encoder: AudioEncoder, items: Sequence[MediaItem]) -> tuple[list[Tensor], Tensor]:
    """The arguments of `AudioEncoder.run` for items: the input of the layers for each of them, and `cu_seqlens`."""
    sample = encoder.sample
    features = [torch.tensor(item.features, dtype=sample.dtype, device=sample.device) for item in items]
    embedded = [encoder.embed(one, item.columns, item.before) for one, item in zip(features, items, strict=True)]
    return embedded, torch.tensor([0, *itertools.accumulate(map(len, embedded))])


def encode_items(encoder: AudioEncoder, items: Sequence[MediaItem]) -> list[Tensor]:
    """Encode items, all together: (tokens, size) of each."""
    embedded, offsets = embed_items(encoder, items)
    return encoder.run(embedded, VarlenAttend(offsets), offsets)


class CrossWriter:
    """Encodes items and writes the keys and values that cross-attention reads to blocks of `cache`."""

    def __init__(self, model: Decoder, encoder: AudioEncoder, cache: KVCache, block_size: int) -> None:
        self._model = model
        self._encoder = encoder
        self._cache = cache
        self._block_size = block_size

    def encode(self, entries: Sequence[CrossItem]) -> None:
        """Encode the items of `entries`, all together, and write each one's keys and values to its blocks."""
        encoded = encode_items(self._encoder, [entry.item for entry in entries if entry.item is not None])
        self._write(torch.cat(encoded), torch.cat([self._slots(entry) for entry in entries]))

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


class TokenEmbedder:
    """Holds the embeddings of items with placeholder tokens, as the scheduler's `EncoderCache` decides."""

    def __init__(self, encoder: AudioEncoder) -> None:
        self._encoder = encoder
        self._kept: dict[bytes, Tensor] = {}

    def evict(self, keys: Iterable[bytes]) -> None:
        """Forget items."""
        for key in keys:
            self._kept.pop(key, None)

    def encode(self, entries: Sequence[EncodedItem]) -> None:
        """Encode items, all together, and keep their embeddings."""
        encoded = encode_items(self._encoder, [entry.item for entry in entries])
        for entry, embeddings in zip(entries, encoded, strict=True):
            own = embeddings[: entry.item.length]  # positions may have been filled up
            self._kept[entry.key] = own if len(own) == len(embeddings) and len(entries) == 1 else own.clone()

    def missing(self, entries: Iterable[EncodedItem]) -> list[EncodedItem]:
        """The items that are not kept."""
        return [entry for entry in entries if entry.key not in self._kept]

    def embeddings(self, parts: Sequence[tuple[int, ItemPart]]) -> ItemEmbeddings | None:
        """Replacements of placeholder embeddings. `parts`: with the index of the first token of each in the step.

        Raises:
            RuntimeError: an item is not kept, because its encoding has failed.
        """
        if not parts:
            return None
        rows, values = [], []
        for row, part in parts:
            kept = self._kept.get(part.key)
            if kept is None:
                raise RuntimeError("the item could not be encoded")
            rows.append(torch.arange(row, row + part.count))
            values.append(kept[part.first : part.first + part.count])
        return ItemEmbeddings(torch.cat(rows).to(values[0].device), torch.cat(values))
