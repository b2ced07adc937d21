"""Encodes audio that arrives in pieces, for sequences that read one frame of it with each token."""

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
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.states import StateCaches
from quire.engine.models.layers.inputs import ItemEmbeddings, StepStates
from quire.engine.models.layers.stem import CausalConvStemLayer, StemState
from quire.engine.models.networks.audio_encoder import AudioEncoder
from quire.engine.models.specs.cache import CacheGroup, WindowCache
from quire.engine.models.specs.decoder import AudioEncoderSpec, GroupedQueryAttention, Layer
from quire.engine.scheduling.plan import EncodedAudio, ScheduledSequence, StepPlan
from quire.engine.scheduling.streaming_scheduler import MAX_PIECE

_FRAMES = 2 * MAX_PIECE  # of a sequence whose embeddings are kept: a piece is encoded when fewer than one are not read


@dataclass(frozen=True, slots=True)
class StreamingCacheSize:
    """Size of what a `StreamingEncoder` keeps of sequences beside the states of their stems.

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
        return pages + _FRAMES * self.hidden * self.dtype.itemsize


def streaming_cache_size(
    spec: AudioEncoderSpec, hidden: int, block_size: int, dtype: torch.dtype, alignment: int
) -> StreamingCacheSize:
    """Return the size of what is kept of one sequence.

    `hidden`: elements of an embedding; `alignment`: the device's.
    """
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


class StreamingEncoder(ItemEncoder):
    """Encode the audio of sequences that read one frame with each token.

    The states of the stems are in slots. The rest has a place for each row of the request table: a ring of
    pages, over which attention is that of a decoder, whose window bounds what is kept; and embeddings that are not read
    yet.
    """

    changes_embeddings = True

    def __init__(
        self,
        encoder: AudioEncoder,
        device: Device,
        size: StreamingCacheSize,
        table: RequestTable,
        states: StateCaches,
        stem_state: int,
    ) -> None:
        """Allocate memory for all rows.

        Args:
            encoder: the model.
            device: what runs it.
            size: bytes of a row.
            table: the sequences in the batch.
            states: their states.
            stem_state: index of that of the stem.

        Raises:
            OutOfCacheMemory: there is not enough.
        """
        stem, spec, rows = encoder.stem, encoder.spec, len(table.lengths)
        assert isinstance(stem, CausalConvStemLayer)
        self._encoder = encoder
        self._stem = stem
        self._size = size
        self._window = max(_window(layer) for layer in spec.layers)
        self._table = table
        self._states = states
        self._stem_state = stem_state
        self._cache: KVCache = device.allocate_cache(size.layout, rows * size.pages, size.block_size, size.dtype, 0, 0)
        # The embedding of a frame is at its index modulo _FRAMES.
        self._embeddings = encoder.sample.new_zeros(rows, _FRAMES, size.hidden)
        self._encoded = [0] * rows  # number of frames

    @override
    def update(self, plan: StepPlan) -> None:
        for new in plan.new:
            self._encoded[self._table.row_of(new.request_id)] = 0

    @override
    def prepare(self, plan: StepPlan, scheduled: Sequence[ScheduledSequence]) -> None:
        names = {sequence.request_id for sequence in scheduled}
        pieces = [piece for piece in plan.audio if piece.request_id in names]
        # A step that has failed may have encoded some before.
        if left := [piece for piece in pieces if piece.first == self._encoded[self._table.row_of(piece.request_id)]]:
            self.encode(left)

    def encode(self, pieces: Sequence[EncodedAudio]) -> None:
        """Encode the next piece of each of several sequences, all together. If that fails, nothing has changed."""
        rows, joined = [self._table.row_of(piece.request_id) for piece in pieces], self._encoder.spec.joined
        spans = [Span(row, 0, piece.first, 0, False, False) for row, piece in zip(rows, pieces, strict=True)]
        states = self._states.of_step(spans)
        embedded = self._embedded(pieces, states)
        starts = [piece.first * joined for piece in pieces]
        positions = [torch.arange(start, start + len(x)) for start, x in zip(starts, embedded, strict=True)]
        offsets = torch.tensor([0, *(len(x) for x in embedded)]).cumsum(0)
        attend = self._attend(rows, positions, offsets.tolist())
        device = self._encoder.sample.device
        encoded = self._encoder.run(embedded, attend, offsets, positions=torch.cat(positions).to(device))
        states.commit()
        for row, piece, values in zip(rows, pieces, encoded, strict=True):
            self._encoded[row] = piece.first + len(values)
            self._embeddings[row, self._places(piece.first, len(values))] = values

    def _embedded(self, pieces: Sequence[EncodedAudio], states: StepStates) -> list[Tensor]:
        """The input of the encoder's layers for each piece."""
        sample, embedded, after = self._encoder.sample, [], []
        for piece, *before in zip(pieces, *states.read(self._stem_state), strict=True):
            features = torch.tensor(piece.features, dtype=sample.dtype, device=sample.device)
            x, state = self._stem(features, StemState(*before))
            embedded.append(x)
            after.append(state)
        states.write(self._stem_state, [torch.stack(arrays) for arrays in zip(*after, strict=True)])
        return embedded

    @override
    def embeddings(self, sequences: Sequence[tuple[Span, ScheduledSequence]]) -> ItemEmbeddings | None:
        tokens, values = [], []
        for span, _ in sequences:
            if span.length > self._encoded[span.row]:
                raise RuntimeError("the audio could not be encoded")
            tokens.append(torch.arange(span.offset, span.offset + span.count))
            values.append(self._embeddings[span.row, self._places(span.start, span.count)])
        return ItemEmbeddings(torch.cat(tokens).to(values[0].device), torch.cat(values), added=True)

    def _places(self, first: int, count: int) -> Tensor:
        """Where the embeddings of frames are in their row."""
        return torch.arange(first, first + count, device=self._embeddings.device) % _FRAMES

    @override
    def missing(self, plan: StepPlan) -> list[bytes]:
        return []

    def _attend(self, rows: Sequence[int], positions: Sequence[Tensor], offsets: Sequence[int]) -> PagedAttention:
        """The attention of pieces that begin at `offsets` among all of their positions."""
        size, pages, device = self._size.block_size, self._size.pages, self._encoder.sample.device
        slots, ranges = [], list[tuple[int, int, QueryAttention]]()
        for row, row_positions, begin in zip(rows, positions, offsets, strict=False):
            base, start, end = row * pages, int(row_positions[0]), int(row_positions[-1]) + 1
            slots.append((base + row_positions // size % pages) * size + row_positions % size)
            first = max(0, start - self._window + 1) // size
            table = base + torch.arange(first, (end - 1) // size + 1) % pages
            span = PrefillSpan(table.to(device, torch.int32), end - first * size)
            ranges.append((begin, begin + len(row_positions), span))
        self._cache.ensure_mapped(max(int(row_slots.max()) for row_slots in slots) // size)
        group = GroupAttention(torch.cat(slots).to(device), SequentialRanges(ranges))
        return PagedAttention(self._cache.layers, [group])
