"""Attention by Triton kernels: generated tokens in one call, the spans of prompts in another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.execution.attention.backend import AttentionBackend, PreparedAttention
from quire.engine.execution.attention.cross_attention import PagedCrossAttention
from quire.engine.execution.attention.paged import GroupAttention, PagedAttention, QueryAttention
from quire.engine.execution.attention.selected import places_on_device, selected_counts
from quire.engine.execution.cache import KVCache
from quire.engine.execution.cache_layout import LayerCache
from quire.engine.execution.inputs import CrossAttentionInputs, DeviceMetadata, StepInputs
from quire.kernels.paged_attention import AttentionParams, attend_singles, attend_spans


@dataclass(frozen=True, slots=True)
class SingleQueries(QueryAttention):
    """Queries that attend as single tokens, each a row of `tables` (tokens, blocks) int32 and `lengths` (tokens,)."""

    tables: Tensor
    lengths: Tensor
    max_len: int

    @override
    def __call__(self, q: Tensor, cache: LayerCache, params: AttentionParams) -> Tensor:
        return attend_singles(q, cache.keys, cache.values, self.tables, self.lengths, self.max_len, params)


@dataclass(frozen=True, slots=True)
class StepQueries(QueryAttention):
    """All queries of a step. `visible`: see `VisibleRanges.bounds`."""

    metadata: DeviceMetadata
    visible: Tensor | None = None

    @override
    def __call__(self, q: Tensor, cache: LayerCache, params: AttentionParams) -> Tensor:
        singles, spans = self.metadata.singles, self.metadata.spans
        count, out = len(singles.seq_lens), []
        if count or not len(spans.seq_lens):
            generated = SingleQueries(singles.block_tables, singles.seq_lens, self.metadata.max_seq_len)
            out.append(generated(q[:count], cache, params))
        if len(spans.seq_lens):
            visible = None if self.visible is None or params.is_causal else self.visible[count:]
            starts, tables, lengths = self.metadata.query_starts, spans.block_tables, spans.seq_lens
            out.append(attend_spans(q[count:], cache.keys, cache.values, tables, lengths, starts, params, visible))
        return out[0] if len(out) == 1 else torch.cat(out)


class TritonAttention(AttentionBackend):
    """Attention over the pages of `cache`."""

    def __init__(self, cache: KVCache) -> None:
        self._layers = cache.layers
        self._selected = selected_counts(cache.layout)

    @override
    def prepare(self, inputs: StepInputs) -> PreparedAttention:
        groups, visible = list[GroupAttention](), inputs.visible
        bounds = None if visible is None else visible.bounds
        for group, top_k in zip(inputs.groups, self._selected, strict=True):
            metadata = group.attention
            assert isinstance(metadata, DeviceMetadata), "the inputs were built for another backend"
            rows = SingleQueries(metadata.logits.block_tables, metadata.logits.seq_lens, metadata.max_seq_len)
            logits_rows = None if visible is not None and visible.precedes_windows else rows
            places = None if top_k is None else places_on_device(metadata, inputs.num_tokens, top_k)
            groups.append(GroupAttention(group.slots, StepQueries(metadata, bounds), logits_rows, places))
        attend = PagedAttention(self._layers, groups, inputs.model.logits_indices)
        cross = None if inputs.cross is None else _cross(self._layers, inputs.cross)
        return PreparedAttention(attend, inputs.static, cross)


def _cross(layers: Mapping[int, LayerCache], inputs: CrossAttentionInputs) -> PagedCrossAttention:
    """Cross-attention, in which all tokens attend as single ones: the positions of an item have no order."""
    most = inputs.tables.shape[1] * layers[0].keys.shape[2]
    return PagedCrossAttention(
        layers,
        SingleQueries(inputs.tables, inputs.lengths, most),
        SingleQueries(inputs.logits_tables, inputs.logits_lengths, most),
    )
