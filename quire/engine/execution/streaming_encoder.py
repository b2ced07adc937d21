"""Encodes audio that arrives in pieces: the encoder state of each sequence, and embeddings that are not read yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.execution.attention.paged import (
    GroupAttention,
    PagedAttention,
    PrefillSpan,
    QueryAttention,
    SequentialRanges,
)
from quire.engine.execution.cache import KVCache
from quire.engine.execution.cache_layout import CacheLayout
from quire.engine.execution.devices.device import Device
from quire.engine.execution.inputs import Span
from quire.engine.execution.item_encoder import ItemEncoder
from quire.engine.models.layers.inputs import ItemEmbeddings
from quire.engine.models.layers.stem import CausalConvStemLayer, StemState
from quire.engine.models.networks.audio_encoder import AudioEncoder
from quire.engine.models.specs.cache import CacheGroup, WindowCache
from quire.engine.models.specs.decoder import AudioEncoderSpec, GroupedQueryAttention, Layer
from quire.engine.scheduling.plan import EncodedAudio, ScheduledSequence, StepPlan
from quire.engine.scheduling.streaming_scheduler import MAX_PIECE


@dataclass(frozen=True, slots=True)
class StreamingCacheSize:
    """Size of the encoder states of sequences.

    Attributes:
        layout: what the layers cache.
        pages: number of pages of one sequence, a ring with the positions that those of a piece attend to.
        block_size: number of positions of a page.
        dtype: dtype of the elements.
        hidden: number of elements of an embedding.
    """

    layout: CacheLayout
    pages: int
    block_size: int
    dtype: torch.dtype
    hidden: int

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence."""
        pages = self.pages * self.layout.block_bytes(self.block_size, self.dtype)
        return pages + 2 * MAX_PIECE * self.hidden * self.dtype.itemsize


def streaming_cache_size(
    spec: AudioEncoderSpec, hidden: int, block_size: int, dtype: torch.dtype, alignment: int
) -> StreamingCacheSize:
    """The size of one encoder state. `hidden`: elements of an embedding; `alignment`: the device's."""
    shapes = [_attention(layer).cache_shape(alignment) for layer in spec.layers]
    window = max(_window(layer) for layer in spec.layers)
    layout = CacheLayout.of_one_group(shapes, CacheGroup(WindowCache(window), tuple(range(len(shapes)))))
    return StreamingCacheSize(layout, _pages(window, MAX_PIECE * spec.joined, block_size), block_size, dtype, hidden)


def _attention(layer: object) -> GroupedQueryAttention:
    assert isinstance(layer, Layer)
    assert isinstance(layer.attn, GroupedQueryAttention)
    return layer.attn


def _window(layer: object) -> int:
    window = _attention(layer).window
    assert window is not None
    return window


def _pages(window: int, piece: int, block_size: int) -> int:
    """Most pages that hold the positions of a piece and those before it in its window."""
    return (window - 1 + piece - 2) // block_size + 2


@dataclass(slots=True)
class _Stream:
    """The encoder state of one sequence.

    Attributes:
        slot: index of its ring of pages.
        encoded: number of frames.
        stem: state of the convolutions.
        embeddings: (frames, hidden), of the last frames.
    """

    slot: int
    stem: StemState
    embeddings: Tensor
    encoded: int = 0


class StreamingEncoder(ItemEncoder):
    """Encode the audio of sequences that read one frame with each token.

    The convolutions carry their last columns. Attention is that of a decoder, over a ring of pages of each sequence:
    its window bounds what is kept.
    """

    changes_embeddings = True

    def __init__(self, encoder: AudioEncoder, device: Device, size: StreamingCacheSize, streams: int) -> None:
        """Allocate memory for `streams` sequences.

        Raises:
            OutOfCacheMemory: there is not enough.
        """
        stem, spec = encoder.stem, encoder.spec
        assert isinstance(stem, CausalConvStemLayer)
        self._encoder = encoder
        self._stem = stem
        self._size = size
        self._window = max(_window(layer) for layer in spec.layers)
        self._cache: KVCache = device.allocate_cache(size.layout, streams * size.pages, size.block_size, size.dtype, 0)
        self._streams: dict[str, _Stream] = {}
        self._free = list(range(streams - 1, -1, -1))

    @property
    def streams(self) -> int:
        """Number of sequences with a state."""
        return len(self._streams)

    @override
    def update(self, plan: StepPlan) -> None:
        for name in plan.removed:
            self._free.append(self._streams.pop(name).slot)
        for new in plan.new:
            sample = self._encoder.sample
            nothing = sample.new_zeros(0, self._size.hidden)
            self._streams[new.request_id] = _Stream(self._free.pop(), self._stem.start(sample), nothing)

    @override
    def prepare(self, plan: StepPlan, scheduled: Sequence[ScheduledSequence]) -> None:
        starts = {sequence.request_id: sequence.start for sequence in scheduled}
        for name, start in starts.items():
            stream = self._streams[name]
            unread = stream.encoded - start  # frames that the sequence has not read
            stream.embeddings = stream.embeddings[len(stream.embeddings) - unread :]
        pieces = [piece for piece in plan.audio if piece.request_id in starts]
        if left := [piece for piece in pieces if piece.first == self._streams[piece.request_id].encoded]:
            self.encode(left)

    def encode(self, pieces: Sequence[EncodedAudio]) -> None:
        """Encode the next piece of each of several sequences, all together. If that fails, nothing has changed."""
        streams, joined = [self._streams[piece.request_id] for piece in pieces], self._encoder.spec.joined
        embedded, stems = [], []
        for piece, stream in zip(pieces, streams, strict=True):
            sample = self._encoder.sample
            x, stem = self._stem(torch.tensor(piece.features, dtype=sample.dtype, device=sample.device), stream.stem)
            embedded.append(x)
            stems.append(stem)
        starts = [stream.encoded * joined for stream in streams]
        positions = [torch.arange(start, start + len(x)) for start, x in zip(starts, embedded, strict=True)]
        offsets = torch.tensor([0, *(len(x) for x in embedded)]).cumsum(0)
        attend = self._attend(streams, positions, offsets.tolist())
        device = self._encoder.sample.device
        encoded = self._encoder.run(embedded, attend, offsets, positions=torch.cat(positions).to(device))
        for stream, stem, values in zip(streams, stems, encoded, strict=True):
            stream.stem = stem
            stream.encoded += len(values)
            stream.embeddings = torch.cat((stream.embeddings, values))

    @override
    def embeddings(self, sequences: Sequence[tuple[Span, ScheduledSequence]]) -> ItemEmbeddings | None:
        rows, values = [], []
        for span, sequence in sequences:
            stream = self._streams[sequence.request_id]
            first = len(stream.embeddings) - (stream.encoded - span.start)
            frames = stream.embeddings[first : first + span.count]
            if first < 0 or len(frames) < span.count:
                raise RuntimeError("the audio could not be encoded")
            rows.append(torch.arange(span.offset, span.offset + span.count))
            values.append(frames)
        return ItemEmbeddings(torch.cat(rows).to(values[0].device), torch.cat(values), added=True)

    @override
    def missing(self, plan: StepPlan) -> list[bytes]:
        return []

    def _attend(
        self, streams: Sequence[_Stream], positions: Sequence[Tensor], offsets: Sequence[int]
    ) -> PagedAttention:
        """The attention of pieces that begin at `offsets` among all of their positions."""
        size, pages, device = self._size.block_size, self._size.pages, self._encoder.sample.device
        slots, ranges = [], list[tuple[int, int, QueryAttention]]()
        for stream, stream_positions, begin in zip(streams, positions, offsets, strict=False):
            base, start, end = stream.slot * pages, int(stream_positions[0]), int(stream_positions[-1]) + 1
            slots.append((base + stream_positions // size % pages) * size + stream_positions % size)
            first = max(0, start - self._window + 1) // size
            table = base + torch.arange(first, (end - 1) // size + 1) % pages
            span = PrefillSpan(table.to(device, torch.int32), end - first * size)
            ranges.append((begin, begin + len(stream_positions), span))
        self._cache.ensure_mapped(max(int(stream_slots.max()) for stream_slots in slots) // size)
        group = GroupAttention(torch.cat(slots).to(device), SequentialRanges(ranges))
        return PagedAttention(self._cache.layers, [group])
