"""StepInputs: the scheduled sequences of a step as flat tensors, and the builders that make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from quire.engine.execution.request_table import RequestTable
from quire.engine.models.layers.inputs import NO_LORA, LoRAIds, ModelInputs
from quire.engine.scheduling.plan import BidirectionalSpan, ScheduledSequence
from quire.kernels import native
from quire.kernels.paged_attention import AttentionMetadata

_SPAN_ORDER = itemgetter(0, 1)
_MAX_CACHED_VIEWS = 256  # step sizes whose views of the static arrays are kept


class Span(msgspec.Struct, frozen=True):  # a step makes many: a frozen dataclass takes several times as long
    """Consecutive tokens of one sequence in a step.

    Attributes:
        row: the sequence's row in the request table.
        offset: index of the first token among the step's tokens.
        start: position of the first token in the sequence.
        count: number of tokens.
        generated: all of them were sampled or are a draft, else all belong to the prompt. Tokens of the prompt are
            computed by the prefill kernel, other tokens by the decode kernel: so a sequence that is computed again
            after preemption, or with a draft, has the same results bit for bit.
        samples: the next token is sampled from the last one.
        draft: the last tokens, where they are speculated. The token before them and each confirmed one yield a token.
        bidirectional: those of its tokens that attend to each other in both directions.
    """

    row: int
    offset: int
    start: int
    count: int
    generated: bool
    samples: bool
    draft: tuple[int, ...] = ()
    bidirectional: tuple[BidirectionalSpan, ...] = ()

    @property
    def length(self) -> int:
        """Computed tokens of the sequence after the step."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a step.

    Attributes:
        spans: generated tokens first, in order of start, then those of prompts.
        model: inputs of the model.
        groups: inputs of the attention of each group of layers.
        last_block: largest block index that the step writes to.
        static: the tensors are at the same addresses in every static step, so that its kernel calls can be replayed.
        cross: inputs of their cross-attention; None in models without it.
        visible: positions that tokens attend to beside earlier ones in their window; None: there are none.
        padded: the tokens of a static step that a GPU replays, of which each sequence has one, and padding the others;
            None: it is no such step.
        arrays: of each group, the arrays at fixed addresses that `build_inputs` fills again for the tokens that follow
            those of a static decode step; None: it is no such step, or their inputs need more than that.
    """

    spans: Sequence[Span]
    model: ModelInputs
    groups: Sequence[GroupInputs]
    last_block: int
    static: bool = False
    cross: CrossAttentionInputs | None = None
    visible: VisibleRanges | None = None
    padded: int | None = None
    arrays: Sequence[object] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return len(self.model.token_ids)

    @property
    def num_logits(self) -> int:
        """Number of logits rows if every sequence needs the logits of its last token only, without those of padding."""
        indices = self.model.logits_indices
        return len(self.spans) if indices is None else len(indices)


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """The inputs of the attention of one group of layers.

    Attributes:
        slots: (tokens,) int64 slot mapping, block * block_size + offset in the block.
        attention: inputs of the device's attention kernels; None for the reference.
    """

    slots: Tensor
    attention: NativeMetadata | DeviceMetadata | None = None


@dataclass(frozen=True, slots=True)
class CrossAttentionInputs:
    """Block tables (tokens, blocks) int32 and lengths (tokens,) int64 of the encoded positions of each token.

    The same for the rows `logits_indices`; all rows, if these are all.
    """

    tables: Tensor
    lengths: Tensor
    logits_tables: Tensor
    logits_lengths: Tensor


@dataclass(frozen=True, slots=True)
class VisibleRanges:
    """Positions that the tokens of a step attend to beside earlier ones in their window.

    Attributes:
        bounds: (tokens, 2) int32, the first position of each token's range, and the one behind it. Its own is among
            them. Generated tokens attend to earlier ones only, whatever their range.
        precedes_windows: ranges may begin before the windows of layers. Rows `logits_indices` then cannot attend as
            single tokens.
    """

    bounds: Tensor
    precedes_windows: bool


@dataclass(frozen=True, slots=True)
class NativeMetadata:
    """Block tables and lengths of all queries, and of the rows `logits_indices`, which attend as single tokens."""

    spans: AttentionMetadata
    logits: AttentionMetadata


@dataclass(frozen=True, slots=True)
class QueryTables:
    """Block tables (queries, blocks) int32 and lengths (queries,) int32 of queries, their own positions included.

    Rows of padding have a length of 0, so that kernels skip them.
    """

    block_tables: Tensor
    seq_lens: Tensor


@dataclass(frozen=True, slots=True)
class DeviceMetadata:
    """The queries of a step: generated tokens first, each a query of its own, then spans of prompts.

    Attributes:
        singles: of queries of one token.
        spans: of spans of prompts.
        query_starts: (spans + 1,) int32 first token of each span, counted from that of the first span, and their end.
        logits: of the rows `logits_indices`, which attend as single tokens.
        max_seq_len: an upper bound of all lengths.
    """

    singles: QueryTables
    spans: QueryTables
    query_starts: Tensor
    logits: QueryTables
    max_seq_len: int


class InputBuilder(Protocol):
    """Build the inputs of a step from its scheduled sequences."""

    def build(self, scheduled: Sequence[ScheduledSequence]) -> StepInputs:
        """The request table already holds the new blocks and drafts."""


class NumpyInputBuilder(InputBuilder):
    """Build new tensors for every step, on the host."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table

    @override
    def build(self, scheduled: Sequence[ScheduledSequence]) -> StepInputs:
        table, spans = self._table, make_spans(scheduled, self._table)
        rows = np.repeat([span.row for span in spans], [span.count for span in spans])
        positions = np.concatenate([np.arange(span.start, span.length) for span in spans])
        block, offset = np.divmod(positions, table.block_size)
        blocks = table.blocks[:, rows, block].astype(np.int64)
        # Kernels read a group's slots side by side; so far those of a token are.
        slots = np.ascontiguousarray(blocks * table.block_size + offset)
        indices = logits_rows(spans)
        return StepInputs(
            spans,
            ModelInputs(
                torch.from_numpy(table.tokens[rows, positions].astype(np.int64)),
                torch.from_numpy(rope_indices(spans, table, positions + table.rope_offsets[rows])),
                None if len(indices) == len(positions) else torch.tensor(indices, dtype=torch.int64),
                lora_ids=_lora_ids(spans, table.lora_ids) if table.lora_ids else None,
            ),
            [GroupInputs(torch.from_numpy(of_group)) for of_group in slots],
            int(blocks.max()),
            visible=visible_ranges(spans),
        )


class NativeInputBuilder(InputBuilder):
    """Build all inputs in one native call, into arrays at fixed addresses if the step is not too large.

    One call, because the weights that a step reads evict everything else from the caches, so that each line of Python
    takes long (decision 013).
    """

    def __init__(self, table: RequestTable, max_static_tokens: int) -> None:
        """`max_static_tokens`: larger steps get newly allocated arrays."""
        self._table = table
        self._max_static_tokens = max_static_tokens
        self._static = _Arrays(table, max_static_tokens, max_static_tokens)
        self._cross = _CrossAttentionArrays(table, max_static_tokens) if table.cross_blocks.size else None

    @override
    def build(self, scheduled: Sequence[ScheduledSequence]) -> StepInputs:
        spans = make_spans(scheduled, self._table)
        queries = queries_of(spans)
        tokens = spans[-1].offset + spans[-1].count
        static = tokens <= self._max_static_tokens
        arrays = self._static if static else _Arrays(self._table, tokens, len(queries.rows))
        every = len(queries.sampling) == tokens == queries.singles
        last_block = 0
        for checked in arrays.checked:
            last = native.kernels.build_inputs(
                checked,
                queries.rows,
                queries.starts,
                queries.counts,
                queries.singles,
                [] if every else queries.sampling,
            )
            last_block = max(last_block, last)
        inputs, groups = arrays.views(tokens, len(queries.rows), None if every else len(queries.sampling))
        if self._table.rows_with_rope_offset:
            inputs.positions.add_(_rope_offsets(spans, self._table))
        if reads_placed_prompts(spans, self._table):
            indices = rope_indices(spans, self._table, inputs.positions.numpy())
            inputs = replace(inputs, positions=torch.from_numpy(indices))
        if self._table.lora_ids:
            inputs = replace(inputs, lora_ids=_lora_ids(spans, self._table.lora_ids))
        cross = None if self._cross is None else self._cross.build(spans, static=static)
        refilled = arrays.checked if static and every and not self._table.rows_with_rope_offset else None
        return StepInputs(spans, inputs, groups, last_block, static, cross, visible_ranges(spans), arrays=refilled)


class Queries(NamedTuple):
    """The spans of tokens that attend together: single tokens, then longer spans or single tokens of prompts.

    Attributes:
        rows: rows of the request table; starts: first positions; counts: numbers of tokens.
        singles: number of spans that attend as single tokens, the first ones.
        sampling: indices of those whose last token yields the next one, without a draft.
    """

    rows: list[int]
    starts: list[int]
    counts: list[int]
    singles: int
    sampling: list[int]


def queries_of(spans: Sequence[Span]) -> Queries:
    """The spans of tokens of a step that attend together."""
    rows: list[int] = []
    starts: list[int] = []
    counts: list[int] = []
    sampling: list[int] = []
    singles = 0
    for span in spans:
        count = span.count
        if span.generated:
            singles += count
        if count == 1 or not span.generated:
            rows.append(span.row)
            starts.append(span.start)
            counts.append(count)
        else:
            rows += [span.row] * count
            starts += range(span.start, span.length)
            counts += [1] * count
        if span.samples and not span.draft:
            sampling.append(len(rows) - 1)
    return Queries(rows, starts, counts, singles, sampling)


class _Arrays:
    """Memory for the inputs of steps of up to `max_tokens` tokens in `max_queries` spans that attend separately."""

    def __init__(self, table: RequestTable, max_tokens: int, max_queries: int) -> None:
        self._token_ids, self._positions = (torch.empty(max_tokens, dtype=torch.int64) for _ in range(2))
        self._logits_indices = torch.empty(len(table.lengths), dtype=torch.int64)
        self._groups = [_GroupArrays.empty(table, max_tokens, max_queries) for _ in table.blocks]
        # Checked once: reading the properties of eleven arrays takes longer than the rest of a call.
        self.checked: list[object] = [
            native.kernels.input_arrays(
                known_tokens=torch.from_numpy(table.tokens),
                known_blocks=torch.from_numpy(blocks),
                block_size=table.block_size,
                tokens=self._token_ids,
                positions=self._positions,
                slots=group.slots,
                seq_lens=group.spans.seq_lens,
                span_counts=group.spans.counts,
                block_tables=group.spans.block_tables,
                end_rows=self._logits_indices,
                end_seq_lens=group.logits.seq_lens,
                end_block_tables=group.logits.block_tables,
            )
            for blocks, group in zip(table.blocks, self._groups, strict=True)
        ]
        self._views: dict[tuple[int, int, int | None], tuple[ModelInputs, list[GroupInputs]]] = {}

    def views(self, tokens: int, spans: int, logits: int | None) -> tuple[ModelInputs, list[GroupInputs]]:
        """The parts that a step of that size uses; `logits` is None if all rows are `logits_indices`."""
        views = self._views.get((tokens, spans, logits))
        if views is None:
            if len(self._views) == _MAX_CACHED_VIEWS:
                self._views.clear()
            indices = None if logits is None else self._logits_indices[:logits]
            inputs = ModelInputs(self._token_ids[:tokens], self._positions[:tokens], indices)
            groups = [group.first(tokens, spans, logits or 0) for group in self._groups]
            views = self._views[tokens, spans, logits] = (inputs, groups)
        return views


@dataclass(frozen=True, slots=True)
class _GroupArrays:
    """Memory for the `GroupInputs` of a step."""

    slots: Tensor
    spans: AttentionMetadata
    logits: AttentionMetadata

    @classmethod
    def empty(cls, table: RequestTable, max_tokens: int, max_queries: int) -> _GroupArrays:
        """Allocate the memory; see `_Arrays`."""
        return cls(
            torch.empty(max_tokens, dtype=torch.int64),
            _empty_metadata(table, max_queries),
            _empty_metadata(table, len(table.lengths)),
        )

    def first(self, tokens: int, spans: int, logits: int) -> GroupInputs:
        """Return the part that a step of that size uses."""
        return GroupInputs(self.slots[:tokens], NativeMetadata(_first(self.spans, spans), _first(self.logits, logits)))


class _CrossAttentionArrays:
    """Memory for the cross inputs of steps of up to `max_tokens` tokens."""

    def __init__(self, table: RequestTable, max_tokens: int) -> None:
        self._table = table
        self._all, self._logits = (_CrossAttentionRows(table, rows) for rows in (max_tokens, len(table.lengths)))

    def build(self, spans: Sequence[Span], *, static: bool) -> CrossAttentionInputs:
        """`static`: at the same addresses as in other static steps."""
        table = self._table
        rows = np.repeat([span.row for span in spans], [span.count for span in spans])
        sampling = [span.row for span in spans if span.samples and not span.draft]
        all_rows = self._all if static else _CrossAttentionRows(table, len(rows))
        return CrossAttentionInputs(*all_rows.fill(rows), *self._logits.fill(np.array(sampling, np.int64)))


class _CrossAttentionRows:
    """One block table and length per row."""

    def __init__(self, table: RequestTable, rows: int) -> None:
        self._table = table
        self._tables = np.zeros((rows, table.cross_blocks.shape[1]), np.int32)
        self._lengths = np.zeros(rows, np.int64)
        self._tensors = torch.from_numpy(self._tables), torch.from_numpy(self._lengths)

    def fill(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Copy those of rows of the request table."""
        count = len(rows)
        np.take(self._table.cross_blocks, rows, axis=0, out=self._tables[:count], mode="clip")
        np.take(self._table.cross_lengths, rows, out=self._lengths[:count], mode="clip")
        tables, lengths = self._tensors
        return tables[:count], lengths[:count]


def _lora_ids(spans: Sequence[Span], lora_ids: Mapping[int, int]) -> LoRAIds | None:
    """The adapters of the rows of a step, on the host; None if no row has one.

    `lora_ids`: those of rows of the request table.
    """
    ids = [lora_ids.get(span.row, NO_LORA) for span in spans]
    distinct = set(ids)
    if distinct == {NO_LORA}:
        return None
    tokens = torch.tensor(ids, dtype=torch.int32).repeat_interleave(torch.tensor([span.count for span in spans]))
    logits = [lora_id for span, lora_id in zip(spans, ids, strict=True) if span.samples and not span.draft]
    return LoRAIds(tokens, torch.tensor(logits, dtype=torch.int32), ids[0] if len(distinct) == 1 else None)


def make_spans(scheduled: Sequence[ScheduledSequence], table: RequestTable) -> list[Span]:
    """The spans of a step, in the order of `StepInputs.spans`."""
    spans, offset = [], 0
    rows = map(table.row_of, [item.request_id for item in scheduled])
    ordered = [
        (item.start < table[row].prompt_len, item.start, row, item) for row, item in zip(rows, scheduled, strict=True)
    ]
    if len(ordered) > 1:
        ordered.sort(key=_SPAN_ORDER)
    for in_prompt, start, row, item in ordered:
        spans.append(Span(row, offset, start, item.count, not in_prompt, item.samples, item.draft, item.bidirectional))
        offset += item.count
    return spans


def _rope_offsets(spans: Sequence[Span], table: RequestTable) -> Tensor:
    offsets = table.rope_offsets[[span.row for span in spans]]
    return torch.from_numpy(np.repeat(offsets, [span.count for span in spans]))


def reads_placed_prompts(spans: Sequence[Span], table: RequestTable) -> bool:
    """Whether a step reads prompts whose tokens have three rotary positions."""
    return bool(table.prompt_positions) and any(
        not span.generated and span.row in table.prompt_positions for span in spans
    )


def rope_indices(spans: Sequence[Span], table: RequestTable, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """The indices of tokens into the rope tables, as three rows if the step reads prompts that need them.

    `indices`: (tokens,), as if it read none.
    """
    if not reads_placed_prompts(spans, table):
        return indices
    placed = [span for span in spans if not span.generated and span.row in table.prompt_positions]
    three = np.repeat(indices[None], 3, axis=0)
    for span in placed:
        positions = table.prompt_positions[span.row][:, span.start : span.length]
        three[:, span.offset : span.offset + span.count] = positions
    return three


def visible_ranges(spans: Sequence[Span]) -> VisibleRanges | None:
    """What tokens attend to in both directions in a step, on the host; None if they do nowhere."""
    if not spans or spans[-1].generated or not any(span.bidirectional for span in spans):
        return None
    tokens = spans[-1].offset + spans[-1].count
    bounds = np.zeros((tokens, 2), np.int32)
    precedes_windows = False
    for span in spans:
        rows = bounds[span.offset : span.offset + span.count]
        rows[:, 0] = np.arange(span.start, span.length)
        rows[:, 1] = rows[:, 0] + 1
        for part in span.bidirectional:
            inside = rows[max(0, part.start - span.start) : part.end - span.start]
            inside[:, 1] = part.end
            if part.ignores_windows:
                inside[:, 0] = part.start
                precedes_windows = True
    return VisibleRanges(torch.from_numpy(bounds), precedes_windows)


def logits_rows(spans: Sequence[Span]) -> list[int]:
    """Rows of the last tokens of sequences that sample from them alone, see `ModelInputs.logits_indices`."""
    return [span.offset + span.count - 1 for span in spans if span.samples and not span.draft]


def _empty_metadata(table: RequestTable, rows: int) -> AttentionMetadata:
    tables = torch.zeros(rows, table.blocks.shape[2], dtype=torch.int32)
    return AttentionMetadata(tables, torch.zeros(rows, dtype=torch.int64), torch.zeros(2 + rows, dtype=torch.int64))


def _first(metadata: AttentionMetadata, count: int) -> AttentionMetadata:
    return AttentionMetadata(metadata.block_tables[:count], metadata.seq_lens[:count], metadata.counts)
