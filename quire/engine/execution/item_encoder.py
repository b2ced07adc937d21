"""Encodes multimodal items: for cross-attention, or to change the embeddings of tokens."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from quire.engine.client.protocol import AudioItem, PictureItem
from quire.engine.execution.attention.cross_attention import pad_heads
from quire.engine.execution.attention.varlen import VarlenAttention
from quire.engine.execution.cache import KVCache
from quire.engine.execution.inputs import Span
from quire.engine.models.layers.inputs import ItemEmbeddings
from quire.engine.models.networks.audio_encoder import AudioEncoder
from quire.engine.models.networks.decoder import Decoder, LanguageModel
from quire.engine.models.networks.vision_encoder import PictureRefused, VisionEncoder
from quire.engine.models.specs.decoder import DecoderSpec
from quire.engine.scheduling.plan import CrossAttentionItem, EncodedItem, PlaceholderTokens, ScheduledSequence, StepPlan
from quire.kernels.write_pages import write_pages

logger = logging.getLogger(__name__)


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

    def refusals(self, scheduled: Sequence[ScheduledSequence]) -> dict[str, str]:
        """Why items of these sequences cannot be encoded, by request id; zeros are in their place."""
        return {}


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


def embed_items(encoder: AudioEncoder, items: Sequence[AudioItem]) -> tuple[list[Tensor], Tensor]:
    """The arguments of `AudioEncoder.run` for items: the input of the layers for each of them, and `cu_seqlens`."""
    sample = encoder.sample
    features = [torch.tensor(item.features, dtype=sample.dtype, device=sample.device) for item in items]
    embedded = [
        encoder.embed(item_features, item.columns, item.columns_before)
        for item_features, item in zip(features, items, strict=True)
    ]
    return embedded, torch.tensor([0, *itertools.accumulate(map(len, embedded))])


def encode_items(encoder: AudioEncoder, items: Sequence[AudioItem]) -> list[Tensor]:
    """Encode items, all together: (tokens, size) of each."""
    embedded, offsets = embed_items(encoder, items)
    beside_pictures = [item.beside_pictures for item in items]
    return encoder.run(embedded, VarlenAttention(offsets), offsets, beside_pictures=beside_pictures)


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


@dataclass(frozen=True, slots=True)
class EncodedTokens:
    """The encoding of an item.

    Attributes:
        values: (n, size).
        offsets: (n,) int64, which of the item's tokens have them, in ascending order; None: all of them.
    """

    values: Tensor
    offsets: NDArray[np.int64] | None = None

    def between(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the offsets and the values of those of the item's tokens [first, end) that have one."""
        if self.offsets is None:
            return torch.arange(first, end), self.values[first:end]
        low, high = np.searchsorted(self.offsets, (first, end))
        return torch.from_numpy(self.offsets[low:high]), self.values[low:high]


class PlaceholderEncoder(ItemEncoder):
    """Hold the embeddings of items with placeholder tokens, as the scheduler's `EncoderCache` decides."""

    changes_embeddings = True

    def __init__(self, audio: AudioEncoder | None, vision: VisionEncoder | None) -> None:
        """`audio`, `vision`: the encoders of a model; None: it has none."""
        self._audio = audio
        self._vision = vision
        self._encodings: dict[bytes, EncodedTokens] = {}
        self._refusals: dict[bytes, str] = {}  # of pictures whose encodings are zeros

    @override
    def update(self, plan: StepPlan) -> None:
        for key in plan.evicted:
            self._encodings.pop(key, None)
            self._refusals.pop(key, None)

    @override
    def prepare(self, plan: StepPlan, scheduled: Sequence[ScheduledSequence]) -> None:
        keys = {part.key for sequence in scheduled for part in sequence.items}
        if left := [entry for entry in self._missing(plan.encoded) if entry.key in keys]:
            self.encode(left)

    def encode(self, entries: Sequence[EncodedItem]) -> None:
        """Encode items, and keep their embeddings: audio all together, pictures and what a tower hears one by one."""
        audio = [(entry.key, entry.item) for entry in entries if isinstance(entry.item, AudioItem)]
        if audio and self._audio is not None:
            encoded = encode_items(self._audio, [item for _, item in audio])
            for (key, item), embeddings in zip(audio, encoded, strict=True):
                trimmed = embeddings[: item.length]  # positions may have been filled up
                is_whole = len(trimmed) == len(embeddings) and len(audio) == 1
                self._encodings[key] = EncodedTokens(trimmed if is_whole else trimmed.clone())
        elif self._vision is not None:
            self._encodings |= {key: EncodedTokens(self._vision.encode_audio(item)) for key, item in audio}
        for entry in entries:
            if isinstance(entry.item, PictureItem) and self._vision is not None:
                self._encodings[entry.key] = self._encoded_picture(self._vision, entry.key, entry.item)

    @override
    def missing(self, plan: StepPlan) -> list[bytes]:
        return [entry.key for entry in self._missing(plan.encoded)]

    @override
    def refusals(self, scheduled: Sequence[ScheduledSequence]) -> dict[str, str]:
        return {
            sequence.request_id: self._refusals[part.key]
            for sequence in (scheduled if self._refusals else ())
            for part in sequence.items
            if part.key in self._refusals
        }

    def _encoded_picture(self, vision: VisionEncoder, key: bytes, item: PictureItem) -> EncodedTokens:
        try:
            values = vision.encode(item)
        except PictureRefused as refusal:
            logger.warning("a picture cannot be encoded: %s", refusal)
            self._refusals[key] = f"The picture at token {item.start} of the prompt cannot be encoded: {refusal}."
            values = refusal.stand_in
        return _encoded_tokens(values, item)

    def _missing(self, entries: Iterable[EncodedItem]) -> list[EncodedItem]:
        return [entry for entry in entries if entry.key not in self._encodings]

    @override
    def embeddings(self, sequences: Sequence[tuple[Span, ScheduledSequence]]) -> ItemEmbeddings | None:
        parts: list[tuple[int, PlaceholderTokens]] = [
            (span.offset + part.start - span.start, part) for span, sequence in sequences for part in sequence.items
        ]
        if not parts:
            return None
        rows, values = [], []
        for row, part in parts:
            encoded = self._encodings.get(part.key)
            if encoded is None:
                raise RuntimeError("the item could not be encoded")
            offsets, embeddings = encoded.between(part.first, part.first + part.count)
            rows.append(offsets + (row - part.first))
            values.append(embeddings)
        return ItemEmbeddings(torch.cat(rows).to(values[0].device), torch.cat(values))


def _encoded_tokens(values: Tensor, item: PictureItem) -> EncodedTokens:
    text = item.text_offsets
    offsets = None if text is None else np.setdiff1d(np.arange(item.length), text)
    tokens = item.length if offsets is None else len(offsets)
    if len(values) != tokens:
        raise RuntimeError(f"the picture has {len(values)} embeddings, but its item has {tokens} tokens")
    return EncodedTokens(values, offsets)


def item_encoder(model: LanguageModel, cache: KVCache, block_size: int) -> ItemEncoder:
    """The encoder of a model's items, or of the part of a model that a rank has."""
    if not isinstance(model, Decoder) or (model.encoder is None and model.vision is None):
        return NoItemEncoder()
    assert isinstance(model.spec, DecoderSpec)
    if model.encoder is not None and model.spec.has_cross_attention:
        return CrossAttentionEncoder(model, model.encoder, cache, block_size)
    return PlaceholderEncoder(model.encoder, model.vision)
