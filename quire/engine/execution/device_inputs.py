"""Inputs of the steps of a device that computes in the background: one asynchronous copy for each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from quire.engine.execution.inputs import (
    CrossAttentionInputs,
    DeviceMetadata,
    GroupInputs,
    InputBuilder,
    Queries,
    QueryTables,
    Span,
    StepInputs,
    VisibleRanges,
    make_spans,
    queries_of,
    reads_placed_prompts,
    rope_indices,
    visible_ranges,
)
from quire.engine.execution.pinned import PinnedBuffers, to_device
from quire.engine.execution.request_table import RequestTable
from quire.engine.models.layers.inputs import NO_LORA, LoRAIds, ModelInputs
from quire.engine.scheduling.plan import ScheduledSequence
from quire.kernels.last_tokens import fill_last_tokens

_NO_SLOT = -1  # of padding: its keys and values are not stored
_INT64, _INT32 = 8, 4  # bytes
_ALIGNMENT = 16  # bytes; Triton compiles a kernel once more for pointers that are not aligned to them


class Sizes(NamedTuple):
    """Numbers of elements of a step's arrays, padding included.

    Attributes:
        tokens: tokens of the step.
        singles: queries of one token.
        spans: spans of prompts.
        logits: rows `logits_indices`; 0 if these are all rows.
        has_lora: a sequence may have an adapter, so that there are arrays of their ids.
        groups: groups of layers, each of which has slots and block tables of its own.
    """

    tokens: int
    singles: int
    spans: int
    logits: int
    has_lora: bool
    groups: int

    @property
    def queries(self) -> int:
        """Rows of the block tables of a group."""
        return self.singles + self.spans + self.logits

    @property
    def slots(self) -> int:
        """Elements from the slots of a group to those of the next, so that all are aligned."""
        return self.tokens + -self.tokens % (_ALIGNMENT // _INT64)


class _Offsets(NamedTuple):
    """Where the arrays of a step begin, in bytes: those of int64, those of int32, and changes of block tables."""

    token_ids: int
    positions: int
    slots: int
    logits_indices: int
    rows: int
    single_lens: int
    span_lens: int
    logits_lens: int
    query_starts: int
    lora_ids: int
    logits_lora_ids: int
    changes: int


def _counts(sizes: Sizes) -> tuple[tuple[int, int], ...]:
    """Elements of each array, and their bytes."""
    return (
        *((sizes.tokens, _INT64),) * 2,
        (sizes.slots * sizes.groups, _INT64),
        (sizes.logits, _INT64),
        (sizes.queries * sizes.groups, _INT32),
        (sizes.singles, _INT32),
        (sizes.spans, _INT32),
        (sizes.logits, _INT32),
        (sizes.spans + 1, _INT32),
        (sizes.tokens if sizes.has_lora else 0, _INT32),
        (sizes.logits if sizes.has_lora else 0, _INT32),
    )


def _offsets(sizes: Sizes) -> _Offsets:
    begins = [0]
    for count, itemsize in _counts(sizes):
        end = begins[-1] + count * itemsize
        begins.append(end + -end % _ALIGNMENT)
    return _Offsets(*begins)


class DeviceInputBuilder(InputBuilder):
    """Build the inputs of a step in pinned memory and copy them to the device.

    The block tables of all rows of the request table have a copy on the device, to which a step sends its new blocks
    only. A step in which every sequence samples from one generated token is padded to one of `padded_sizes` and has its
    inputs at the addresses of all steps of that size, so that its kernels can be replayed.

    Attributes:
        padded_sizes: in ascending order; none in models with cross-attention, whose inputs are not at fixed addresses.
        last_tokens: (rows,) int64 the token that was sampled last of each row of the request table. A token whose id
            the host does not know yet is read from it, see `RequestTable.append_unknown`.
    """

    def __init__(self, table: RequestTable, device: torch.device, padded_sizes: Sequence[int] = ()) -> None:
        """`padded_sizes`: in ascending order."""
        groups, rows, blocks = table.blocks.shape
        self._table = table
        self._device = device
        self.padded_sizes = () if table.cross_blocks.size else tuple(padded_sizes)
        self._max_len = table.tokens.shape[1]
        self._buffers = PinnedBuffers(device)
        most = self.padded_sizes[-1] if self.padded_sizes else 0
        self._static = torch.zeros(_static_bytes(most, rows, blocks, groups), dtype=torch.uint8, device=device)
        width = blocks + -blocks % (_ALIGNMENT // _INT32)
        self._static_tables = torch.zeros(groups * most, width, dtype=torch.int32, device=device)
        self._blocks = torch.zeros(groups * rows, width, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)

    @override
    def build(self, scheduled: Sequence[ScheduledSequence]) -> StepInputs:
        spans = make_spans(scheduled, self._table)
        queries = queries_of(spans)
        tokens = spans[-1].offset + spans[-1].count
        every = len(queries.sampling) == tokens == queries.singles
        padded = self._padded_size(tokens) if every else None
        spans_of_prompts = len(queries.rows) - queries.singles
        lora_ids = self._table.lora_ids
        sizes = Sizes(
            tokens if padded is None else padded,
            queries.singles if padded is None else padded,
            spans_of_prompts,
            0 if every else len(queries.sampling),
            bool(lora_ids) and not lora_ids.keys().isdisjoint(queries.rows),
            len(self._table.blocks),
        )
        return self._send(spans, queries, tokens, sizes, scheduled, every=every, static=padded is not None)

    def blank(self, size: int, *, has_lora: bool = False) -> StepInputs:
        """The inputs of a step of one of the padded sizes that consists of padding, with which steps are captured.

        `has_lora`: of a step in which a sequence may have an adapter.
        """
        sizes = Sizes(size, size, 0, 0, has_lora, len(self._table.blocks))
        return self._send([], queries_of([]), 0, sizes, (), every=True, static=True)

    def _padded_size(self, tokens: int) -> int | None:
        return next((size for size in self.padded_sizes if size >= tokens), None)

    def _send(
        self,
        spans: Sequence[Span],
        queries: Queries,
        tokens: int,
        sizes: Sizes,
        scheduled: Sequence[ScheduledSequence],
        *,
        every: bool,
        static: bool,
    ) -> StepInputs:
        """The inputs of a step.

        `every`: logits are computed for all rows. `static`: at the addresses of all steps of that size.
        """
        offsets = _offsets(sizes)
        changes, values = self._changed_blocks(scheduled)
        nbytes = offsets.changes + (_INT64 + _INT32) * len(changes)
        with self._buffers.next(nbytes) as (memory, copy):
            arrays = _Arrays(memory, sizes, offsets)
            last_block, unknown = self._fill(arrays, queries, tokens)
            at = offsets.changes
            memory[at : at + _INT64 * len(changes)].view(np.int64)[:] = changes
            memory[at + _INT64 * len(changes) : nbytes].view(np.int32)[:] = values
            sent = copy(self._static[:nbytes] if static else None)
        self._apply(sent[offsets.changes : nbytes], len(changes))
        views = _views(sent, sizes, offsets)
        if unknown:
            fill_last_tokens(views.token_ids, self.last_tokens)
        indices = None if every else views.logits_indices
        lora_ids = LoRAIds(views.lora_ids, None if every else views.logits_lora_ids) if sizes.has_lora else None
        positions = self._three_positions(spans)
        model = ModelInputs(
            views.token_ids, views.positions if positions is None else positions, indices, lora_ids=lora_ids
        )
        groups = self._groups(spans, sizes, views, static=static)
        cross, visible = self._cross(spans), self._visible(spans)
        padded = sizes.tokens if static else None
        return StepInputs(spans, model, groups, last_block, static, cross, visible, padded)

    def _three_positions(self, spans: Sequence[Span]) -> Tensor | None:
        """Indices into the rope tables (3, tokens) of a step that reads prompts which need them; None for others."""
        table = self._table
        if not reads_placed_prompts(spans, table):
            return None
        indices = [np.arange(span.start, span.length) + table.rope_offsets[span.row] for span in spans]
        return to_device(rope_indices(spans, table, np.concatenate(indices)), self._device)

    def _visible(self, spans: Sequence[Span]) -> VisibleRanges | None:
        """What tokens attend to in both directions; None if they do nowhere."""
        visible = visible_ranges(spans)
        return None if visible is None else replace(visible, bounds=to_device(visible.bounds.numpy(), self._device))

    def _changed_blocks(self, scheduled: Sequence[ScheduledSequence]) -> tuple[list[int], list[int]]:
        """Positions in the flat block tables of the blocks that are new in this step, and the blocks."""
        table, width = self._table, self._blocks.shape[1]
        positions, values = list[int](), list[int]()
        for item in scheduled:
            if item.new_blocks:
                row, count = table.row_of(item.request_id), len(item.new_blocks) // len(table.blocks)
                for group in range(len(table.blocks)):
                    begin = (group * len(table.lengths) + row) * width + int(table.num_blocks[row]) - count
                    positions += range(begin, begin + count)
                values += item.new_blocks
        return positions, values

    def _apply(self, sent: Tensor, count: int) -> None:
        """Write new blocks to the device's block tables."""
        if count:
            positions, values = sent.split([_INT64 * count, _INT32 * count])
            self._blocks.view(-1).index_copy_(0, positions.view(torch.int64), values.view(torch.int32))

    def _fill(self, arrays: _Arrays, queries: Queries, tokens: int) -> tuple[int, bool]:
        """Write the inputs of a step.

        Returns:
            Its largest block, and whether it has tokens that the host does not know.
        """
        table, size = self._table, self._table.block_size
        num_rows = len(queries.rows)
        row, start, count = (np.array(part, np.int64) for part in (queries.rows, queries.starts, queries.counts))
        ends = np.cumsum(count)
        rows = np.repeat(row, count)
        positions = np.repeat(start - ends + count, count) + np.arange(tokens)
        known = table.tokens[rows, positions]
        blocks = table.blocks[:, rows, positions // size].astype(np.int64)
        _put(arrays.token_ids, known, 0)
        _put(arrays.positions, positions + table.rope_offsets[rows], 0)
        for slots, of_group in zip(arrays.slots, blocks, strict=True):
            _put(slots, of_group * size + positions % size, _NO_SLOT)
        sampling = queries.sampling if len(arrays.logits_indices) else []
        arrays.logits_indices[:] = ends[sampling] - 1
        padding = arrays.rows.shape[1] - num_rows - len(sampling)
        order = [row, np.zeros(padding, np.int64), row[sampling]]
        lengths = start + count
        first_rows = np.arange(len(table.blocks))[:, None] * len(table.lengths)  # of each group in the block tables
        arrays.rows[:] = np.concatenate(order) + first_rows
        _put(arrays.single_lens, lengths[: queries.singles], 0)
        arrays.span_lens[:] = lengths[queries.singles :]
        arrays.logits_lens[:] = lengths[sampling]
        arrays.query_starts[0] = 0
        arrays.query_starts[1:] = np.cumsum(count[queries.singles :])
        if len(arrays.lora_ids):
            lora_ids = np.full(len(table.lengths), NO_LORA, np.int32)
            lora_ids[[*table.lora_ids]] = [*table.lora_ids.values()]
            _put(arrays.lora_ids, lora_ids[rows], NO_LORA)
            arrays.logits_lora_ids[:] = lora_ids[row[sampling]]
        return int(blocks.max(initial=0)), bool((known < 0).any())

    def _groups(self, spans: Sequence[Span], sizes: Sizes, views: _Views, *, static: bool) -> list[GroupInputs]:
        out = self._static_tables[: len(views.rows)] if static else None
        tables = torch.index_select(self._blocks, 0, views.rows, out=out)
        longest = self._max_len if static else max(span.length for span in spans)
        groups = list[GroupInputs]()
        for slots, of_group in zip(views.slots.split(sizes.slots), tables.split(sizes.queries), strict=True):
            singles, spans_of_prompts, logits = of_group.split([sizes.singles, sizes.spans, sizes.logits])
            metadata = DeviceMetadata(
                singles=QueryTables(singles, views.single_lens),
                spans=QueryTables(spans_of_prompts, views.span_lens),
                query_starts=views.query_starts,
                logits=QueryTables(logits, views.logits_lens),
                max_seq_len=longest,
            )
            groups.append(GroupInputs(slots[: sizes.tokens], metadata))
        return groups

    def _cross(self, spans: Sequence[Span]) -> CrossAttentionInputs | None:
        """What the tokens of a step attend to across; None in models without it."""
        table = self._table
        if not table.cross_blocks.size:
            return None
        rows = np.repeat([span.row for span in spans], [span.count for span in spans])
        sampling = [span.row for span in spans if span.samples and not span.draft]
        parts = (table.cross_blocks[rows], table.cross_lengths[rows])
        logits = (table.cross_blocks[sampling], table.cross_lengths[sampling])
        return CrossAttentionInputs(*(to_device(part, self._device) for part in (*parts, *logits)))


class _Arrays:
    """The arrays of a step in host memory."""

    def __init__(self, memory: NDArray[np.uint8], sizes: Sizes, offsets: _Offsets) -> None:
        def array(begin: int, count: int, dtype: type[np.int64] | type[np.int32]) -> NDArray[np.int64 | np.int32]:
            return memory[begin : begin + count * np.dtype(dtype).itemsize].view(dtype)

        self.token_ids = array(offsets.token_ids, sizes.tokens, np.int64)
        self.positions = array(offsets.positions, sizes.tokens, np.int64)
        slots = array(offsets.slots, sizes.slots * sizes.groups, np.int64)
        self.slots = slots.reshape(sizes.groups, -1)[:, : sizes.tokens]
        self.logits_indices = array(offsets.logits_indices, sizes.logits, np.int64)
        self.rows = array(offsets.rows, sizes.queries * sizes.groups, np.int32).reshape(sizes.groups, -1)
        self.single_lens = array(offsets.single_lens, sizes.singles, np.int32)
        self.span_lens = array(offsets.span_lens, sizes.spans, np.int32)
        self.logits_lens = array(offsets.logits_lens, sizes.logits, np.int32)
        self.query_starts = array(offsets.query_starts, sizes.spans + 1, np.int32)
        self.lora_ids = array(offsets.lora_ids, sizes.tokens if sizes.has_lora else 0, np.int32)
        self.logits_lora_ids = array(offsets.logits_lora_ids, sizes.logits if sizes.has_lora else 0, np.int32)


class _Views(NamedTuple):
    """The arrays of a step on the device."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    logits_indices: Tensor
    rows: Tensor
    single_lens: Tensor
    span_lens: Tensor
    logits_lens: Tensor
    query_starts: Tensor
    lora_ids: Tensor
    logits_lora_ids: Tensor


def _views(sent: Tensor, sizes: Sizes, offsets: _Offsets) -> _Views:
    return _Views(
        *(
            sent[begin : begin + count * itemsize].view(torch.int64 if itemsize == _INT64 else torch.int32)
            for begin, (count, itemsize) in zip(offsets, _counts(sizes), strict=False)
        )
    )


def _put(array: NDArray[np.int64 | np.int32], values: NDArray[np.int64 | np.int32], padding: int) -> None:
    array[: len(values)] = values
    array[len(values) :] = padding


def _static_bytes(size: int, rows: int, blocks: int, groups: int) -> int:
    """Bytes of the inputs of the largest padded step, in which every sequence may have new blocks."""
    if not size:
        return 0
    sizes = Sizes(size, size, 0, 0, has_lora=True, groups=groups)
    return _offsets(sizes).changes + (_INT64 + _INT32) * groups * rows * blocks
