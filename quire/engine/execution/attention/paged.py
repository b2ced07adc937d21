"""Paged attention of one step: writes keys and values to their slots, then attends in one of several ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.execution.cache_layout import LayerCache
from quire.engine.models.layers.inputs import Selection, StepAttention
from quire.kernels.capture import RowKind, set_row_kind
from quire.kernels.copy_rows import pad_rows
from quire.kernels.paged_attention import (
    AttentionMetadata,
    AttentionParams,
    paged_decode,
    paged_prefill,
    paged_varlen,
)
from quire.kernels.projected_heads import ProjectedHeads
from quire.kernels.qk_norm_rope import qk_norm_rope
from quire.kernels.qk_norm_rope_write import qk_norm_rope_write
from quire.kernels.selected_attention import TokenPlaces, attend_selected, select_positions
from quire.kernels.take_rows import take_rows
from quire.kernels.write_pages import write_pages


class QueryAttention(Protocol):
    """Attention of the queries (tokens, heads, dim) of a step to the pages of one layer."""

    def __call__(self, q: Tensor, cache: LayerCache, params: AttentionParams) -> Tensor:
        """Attend; the result is (tokens, heads, value_dim)."""


@dataclass(frozen=True, slots=True)
class DecodeTokens(QueryAttention):
    """One query per sequence, all in one call; `tables` (tokens, blocks) int32, `lengths` (tokens,) int64."""

    tables: Tensor
    lengths: Tensor

    @override
    def __call__(self, q: Tensor, cache: LayerCache, params: AttentionParams) -> Tensor:
        return paged_decode(q, cache.keys, cache.values, self.tables, self.lengths, params)


@dataclass(frozen=True, slots=True)
class VarlenSpans(QueryAttention):
    """Spans of any length, all in one call. `visible`: see `VisibleRanges.bounds`."""

    metadata: AttentionMetadata
    visible: Tensor | None = None

    @override
    def __call__(self, q: Tensor, cache: LayerCache, params: AttentionParams) -> Tensor:
        visible = None if params.is_causal else self.visible
        return paged_varlen(q, cache.keys, cache.values, self.metadata, params, visible)


@dataclass(frozen=True, slots=True)
class PrefillSpan(QueryAttention):
    """The last queries of one sequence; `table` (blocks,) int32, `length` positions including the queries' own.

    `visible`: see `VisibleRanges.bounds`.
    """

    table: Tensor
    length: int
    visible: Tensor | None = None

    @override
    def __call__(self, q: Tensor, cache: LayerCache, params: AttentionParams) -> Tensor:
        visible = None if params.is_causal else self.visible
        return paged_prefill(q, cache.keys, cache.values, self.table, self.length, params, visible)


@dataclass(frozen=True, slots=True)
class SequentialRanges(QueryAttention):
    """Consecutive ranges [begin, end) of the step's tokens, one call each."""

    ranges: Sequence[tuple[int, int, QueryAttention]]

    @override
    def __call__(self, q: Tensor, cache: LayerCache, params: AttentionParams) -> Tensor:
        out = [attend(q[begin:end], cache, params) for begin, end, attend in self.ranges]
        return out[0] if len(out) == 1 else torch.cat(out)


@dataclass(frozen=True, slots=True)
class GroupAttention:
    """The attention of a group of layers in a step.

    Attributes:
        slots: (tokens,) int64 slot mapping.
        all_rows: attention of all queries of the step.
        logits_rows: attention of the rows `logits_indices` in the last layer; None to attend with `all_rows`.
        places: those of tokens that attend to selected ones of their sequences, see `Selection`; None: all attend to
            all earlier ones.
    """

    slots: Tensor
    all_rows: QueryAttention
    logits_rows: QueryAttention | None = None
    places: TokenPlaces | None = None


@dataclass(frozen=True, slots=True)
class PagedAttention(StepAttention):
    """Attention of a decoder's step over the paged KV cache.

    Attributes:
        layers: the pages of each layer.
        groups: the attention of each group of layers.
        logits_indices: see `ModelInputs`.
    """

    layers: Mapping[int, LayerCache]
    groups: Sequence[GroupAttention]
    logits_indices: Tensor | None = None

    @override
    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        params: AttentionParams,
        *,
        last_layer: bool = False,
        last_token_only: bool = False,
    ) -> Tensor:
        cache = self.layers[layer]
        q = self._written(cache, q, k, v, params)
        out = self._attend(cache, q, params, last_layer, last_token_only)
        return out[..., : cache.shape.value_dim] if cache.shape.is_padded else out

    def _written(self, cache: LayerCache, q: Tensor, k: Tensor, v: Tensor | None, params: AttentionParams) -> Tensor:
        """Write keys and values to the pages; returns the queries with as many elements as keys have there."""
        if cache.shape.is_padded:
            # Zeros change no sum, and pages of other sizes are read by torch, whose order of sums depends on the step.
            q = pad_rows(q, cache.shape.key_elements)
        self._write(cache, k, v, params)
        return q

    def _write(self, cache: LayerCache, k: Tensor, v: Tensor | None, params: AttentionParams) -> None:
        if cache.shape.is_padded:
            k = pad_rows(k, cache.shape.key_elements)
            v = None if v is None else pad_rows(v, cache.shape.value_elements)
        slots = self.groups[cache.group].slots
        scales = params.key_scale, params.value_scale, params.head_scales
        write_pages(cache.keys, cache.values, slots, k, v, *scales)

    @override
    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._write(self.layers[layer], k, v, AttentionParams(1.0))

    @override
    def selected(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        params: AttentionParams,
        selection: Selection,
        *,
        last_layer: bool = False,
        last_token_only: bool = False,
    ) -> Tensor:
        cache = self.layers[layer]
        places = self.groups[cache.group].places
        if places is None:
            return self(layer, q, k, None, params, last_layer=last_layer, last_token_only=last_token_only)
        q = self._written(cache, q, k, None, params)
        rows = self.logits_indices if last_layer and last_token_only else None
        if rows is not None:
            q, places = _select(q, rows), places.of_rows(rows)
        if selection.queries is not None:
            index = selection.queries()
            queries, weights = (part if rows is None else part[rows] for part in (index.queries, index.weights))
            selection.positions.rows = select_positions(
                queries, weights, cache.keys, places, selection.key_dim, selection.top_k, params.key_scale
            )
        elif rows is not None and selection.positions.rows is not None:
            selection.positions.rows = selection.positions.rows[rows]
        positions = selection.positions.rows
        assert positions is not None, f"layer {layer} reads what no layer of the step has selected"
        out = attend_selected(q, cache.keys, cache.values, places, positions, selection.key_dim, params)
        return out[..., : cache.shape.value_dim]

    @override
    def read(
        self,
        layer: int,
        q: Tensor,
        params: AttentionParams,
        *,
        last_layer: bool = False,
        last_token_only: bool = False,
    ) -> Tensor:
        cache = self.layers[layer]
        padded = cache.shape.is_padded
        if padded:
            q = pad_rows(q, cache.shape.key_elements)
        out = self._attend(cache, q, params, last_layer, last_token_only)
        return out[..., : cache.shape.value_dim] if padded else out

    @override
    def of_logits_rows(self) -> StepAttention | None:
        groups = list[GroupAttention]()
        for group in self.groups:
            if group.logits_rows is None or self.logits_indices is None:
                return None
            groups.append(GroupAttention(group.slots, group.logits_rows))
        return PagedAttention(self.layers, groups)

    @override
    def projected(
        self,
        layer: int,
        heads: ProjectedHeads,
        params: AttentionParams,
        *,
        last_layer: bool = False,
        last_token_only: bool = False,
    ) -> Tensor:
        cache = self.layers[layer]
        if cache.shape.is_padded:
            q, k, v = qk_norm_rope(heads)
            return self(layer, q, k, v, params, last_layer=last_layer, last_token_only=last_token_only)
        slots = self.groups[cache.group].slots
        scales = params.key_scale, params.value_scale, params.head_scales
        q = qk_norm_rope_write(heads, cache.keys, cache.values, slots, *scales)
        return self._attend(cache, q, params, last_layer, last_token_only)

    def _attend(
        self, cache: LayerCache, q: Tensor, params: AttentionParams, last_layer: bool, last_token_only: bool
    ) -> Tensor:
        group, indices = self.groups[cache.group], self.logits_indices
        if not last_layer or indices is None:
            return group.all_rows(q, cache, params)
        if group.logits_rows is None:
            out = group.all_rows(q, cache, params)
            return out[indices] if last_token_only else out
        if last_token_only:
            set_row_kind(RowKind.LOGITS)  # of this call and all later calls of the step
            return group.logits_rows(_select(q, indices), cache, params)
        out = group.all_rows(q, cache, params)
        out[indices] = group.logits_rows(_select(q, indices), cache, params)
        return out


def _select(q: Tensor, indices: Tensor) -> Tensor:
    selected: Tensor = take_rows(q.flatten(1), indices).unflatten(1, q.shape[1:])
    return selected
