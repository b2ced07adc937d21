"""Encodes multimodal items: for cross-attention, or to change the embeddings of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.client.protocol import MediaItem
from quire.engine.execution.attention.cross_attention import pad_heads
from quire.engine.execution.attention.varlen import VarlenAttention
from quire.engine.execution.cache import KVCache
from quire.engine.execution.inputs import Span
from quire.engine.models.layers.inputs import ItemEmbeddings
from quire.engine.models.networks.audio_encoder import AudioEncoder
from quire.engine.models.networks.decoder import Decoder
from quire.engine.scheduling.plan import CrossAttentionItem, EncodedItem, PlaceholderTokens, ScheduledSequence, StepPlan
from quire.kernels.write_pages import write_pages


class ItemEncoder(Protocol):
    """Encode items. There is an implementation for each way in which a decoder reads them.

    Attributes:
        changes_embeddings: `embeddings` may return something.
    """

    changes_embeddings: bool

    def update(self, plan: StepPlan) -> None:
        """Apply evictions, and sequences that leave and enter the batch."""

    def prepare(self, plan: StepPlan, scheduled: Sequence[ScheduledSequence]) -> None:
        """Encode the items of these sequences of the plan that are not encoded yet."""

    def embeddings(self, sequences: Sequence[tuple[Span, ScheduledSequence]]) -> ItemEmbeddings | None:
        """Embeddings that replace those of tokens of the step, or are added to them; None: none.

        Raises:
            RuntimeError: an item could not be encoded.
        """

    def missing(self, plan: StepPlan) -> list[bytes]:
        """Keys of the plan's items whose encoding has failed."""


class NoItemEncoder(ItemEncoder):
    """The `ItemEncoder` of models without items."""

    changes_embeddings = False

    @override
    def update(self, plan: StepPlan) -> None:
        return None

    @override
    def prepare(self, plan: StepPlan, scheduled: Sequence[ScheduledSequence]) -> None:
        return None

    @override
    def embeddings(self, sequences: Sequence[tuple[Span, ScheduledSequence]]) -> ItemEmbeddings | None:
        return None

    @override
    def missing(self, plan: StepPlan) -> list[bytes]:
        return []


def embed_items(encoder: AudioEncoder, items: Sequence[MediaItem]) -> tuple[list[Tensor], Tensor]:
    """The arguments of `AudioEncoder.run` for items: the input of the layers for each of them, and `cu_seqlens`."""
    sample = encoder.sample
    features = [torch.tensor(item.features, dtype=sample.dtype, device=sample.device) for item in items]
    embedded = [
        encoder.embed(item_features, item.columns, item.columns_before)
        for item_features, item in zip(features, items, strict=True)
    ]
    return embedded, torch.tensor([0, *itertools.accumulate(map(len, embedded))])


def encode_items(encoder: AudioEncoder, items: Sequence[MediaItem]) -> list[Tensor]:
    """Encode items, all together: (tokens, size) of each."""
    embedded, offsets = embed_items(encoder, items)
    return encoder.run(embedded, VarlenAttention(offsets), offsets)


class CrossAttentionEncoder(NoItemEncoder):
    """Encode items and write the keys and values that cross-attention reads to blocks of `cache`."""

    def __init__(self, model: Decoder, encoder: AudioEncoder, cache: KVCache, block_size: int) -> None:
        self._model = model
        self._encoder = encoder
        self._cache = cache
        self._block_size = block_size

    @override
    def prepare(self, plan: StepPlan, scheduled: Sequence[ScheduledSequence]) -> None:
        names = {sequence.request_id for sequence in scheduled}
        entries = [
            new.cross_attention for new in plan.new if new.cross_attention is not None and new.request_id in names
        ]
        if left := [entry for entry in entries if entry.item is not None]:
            self.encode(left)

    def encode(self, entries: Sequence[CrossAttentionItem]) -> None:
        """Encode the items of `entries`, all together, and write each one's keys and values to its blocks."""
        encoded = encode_items(self._encoder, [entry.item for entry in entries if entry.item is not None])
        self._write(torch.cat(encoded), torch.cat([self._slots(entry) for entry in entries]))

    def _slots(self, entry: CrossAttentionItem) -> Tensor:
        """(length,) int64 slot of each position."""
        self._cache.ensure_mapped(max(entry.blocks))
        size = self._block_size
        slots = torch.tensor(entry.blocks)[:, None] * size + torch.arange(size)
        return slots.flatten()[: entry.length].to(self._encoder.sample.device)

    def _write(self, encoded: Tensor, slots: Tensor) -> None:
        for index, k, v in self._model.cross_keys_and_values(encoded):
            cache = self._cache.layers[index]
            k, v = pad_heads(k, cache.shape.key_elements), pad_heads(v, cache.shape.value_elements)
            write_pages(cache.keys, cache.values, slots, k, v)


class PlaceholderEncoder(ItemEncoder):
    """Hold the embeddings of items with placeholder tokens, as the scheduler's `EncoderCache` decides."""

    changes_embeddings = True

    def __init__(self, encoder: AudioEncoder) -> None:
        self._encoder = encoder
        self._embeddings: dict[bytes, Tensor] = {}

    @override
    def update(self, plan: StepPlan) -> None:
        for key in plan.evicted:
            self._embeddings.pop(key, None)

    @override
    def prepare(self, plan: StepPlan, scheduled: Sequence[ScheduledSequence]) -> None:
        keys = {part.key for sequence in scheduled for part in sequence.items}
        if left := [entry for entry in self._missing(plan.encoded) if entry.key in keys]:
            self.encode(left)

    def encode(self, entries: Sequence[EncodedItem]) -> None:
        """Encode items, all together, and keep their embeddings."""
        encoded = encode_items(self._encoder, [entry.item for entry in entries])
        for entry, embeddings in zip(entries, encoded, strict=True):
            trimmed = embeddings[: entry.item.length]  # positions may have been filled up
            is_whole = len(trimmed) == len(embeddings) and len(entries) == 1
            self._embeddings[entry.key] = trimmed if is_whole else trimmed.clone()

    @override
    def missing(self, plan: StepPlan) -> list[bytes]:
        return [entry.key for entry in self._missing(plan.encoded)]

    def _missing(self, entries: Iterable[EncodedItem]) -> list[EncodedItem]:
        return [entry for entry in entries if entry.key not in self._embeddings]

    @override
    def embeddings(self, sequences: Sequence[tuple[Span, ScheduledSequence]]) -> ItemEmbeddings | None:
        parts: list[tuple[int, PlaceholderTokens]] = [
            (span.offset + part.start - span.start, part) for span, sequence in sequences for part in sequence.items
        ]
        if not parts:
            return None
        rows, values = [], []
        for row, part in parts:
            encoded = self._embeddings.get(part.key)
            if encoded is None:
                raise RuntimeError("the item could not be encoded")
            rows.append(torch.arange(row, row + part.count))
            values.append(encoded[part.first : part.first + part.count])
        return ItemEmbeddings(torch.cat(rows).to(values[0].device), torch.cat(values))
