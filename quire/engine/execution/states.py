"""StateCaches: states of recurrent layers, in blocks of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from quire.engine.execution.cache import KVCache
from quire.engine.execution.cache_layout import LayerStates, aligned_state
from quire.engine.execution.inputs import Span
from quire.engine.execution.request_table import RequestTable
from quire.engine.models.layers.inputs import StepStates


class StateCaches:
    """Read and write the states of the sequences in the batch."""

    def __init__(self, cache: KVCache, table: RequestTable, device: torch.device) -> None:
        self._cache = cache
        self._table = table
        self._device = device

    def of_step(self, spans: Sequence[Span]) -> PagedStates:
        """Return the states of the sequences of a step."""
        blocks = self._table.state_blocks[[span.row for span in spans]]
        self._cache.ensure_mapped(int(blocks.max()))
        return PagedStates(self._cache, torch.from_numpy(blocks).to(self._device), spans)


class PagedStates(StepStates):
    """The states of a step, which are written when all layers have been computed: a step that fails changes none."""

    def __init__(self, cache: KVCache, blocks: Tensor, spans: Sequence[Span]) -> None:
        """`blocks`: (sequences, state blocks) int64."""
        self.ranges = [(span.offset, span.offset + span.count) for span in spans]
        self._cache = cache
        self._blocks = blocks
        starts = torch.tensor([span.start for span in spans], device=blocks.device)
        self._begins = (starts == 0).nonzero().flatten()
        self._written: dict[int, Tensor] = {}

    @override
    def read(self, layer: int) -> list[Tensor]:
        states = self._cache.states[layer]
        blocks = self._blocks[:, states.blocks]
        places = states.places.index_select(0, blocks.flatten())  # indexing a CPU's memory copies byte by byte
        rows = places.view(len(blocks), -1)[:, : states.nbytes].contiguous()
        rows[self._begins] = 0
        return _arrays(states, rows)

    @override
    def write(self, layer: int, arrays: Sequence[Tensor]) -> None:
        states = self._cache.states[layer]
        rows = states.places.new_zeros(len(self._blocks), states.nbytes)
        for array, values in zip(_arrays(states, rows), arrays, strict=True):
            array.copy_(values)
        self._written[layer] = rows

    def commit(self) -> None:
        """Store what was written."""
        for layer, rows in self._written.items():
            states = self._cache.states[layer]
            blocks = self._blocks[:, states.blocks]
            size = states.places.shape[1]
            if unused := blocks.shape[1] * size - rows.shape[1]:
                rows = F.pad(rows, (0, unused))
            _store(states.places, blocks.flatten(), rows.view(-1, size))


def _store(places: Tensor, blocks: Tensor, rows: Tensor) -> None:
    """Copy a row to the place in each block."""
    if places.device.type != "cpu":
        places[blocks] = rows
        return
    for block, row in zip(blocks.tolist(), rows, strict=True):  # one by one: indexing copies byte by byte
        places[block].copy_(row)


def _arrays(states: LayerStates, rows: Tensor) -> list[Tensor]:
    """Return views (sequences, *shape) of the arrays in the bytes of states."""
    arrays, begin = list[Tensor](), 0
    for array in states.kind.arrays:
        part = rows[:, begin : begin + array.nbytes]
        arrays.append(part.view(getattr(torch, array.dtype)).unflatten(1, array.shape))
        begin += aligned_state(array.nbytes)
    return arrays
