"""Cross-attention of one step: every token attends to all encoded positions of its sequence."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from quire.engine.execution.attention.paged import DecodeTokens, QueryAttention, SequentialRanges
from quire.engine.execution.cache_layout import LayerCache
from quire.engine.execution.inputs import CrossAttentionInputs, Span
from quire.engine.execution.request_table import RequestTable
from quire.engine.models.layers.inputs import StepCrossAttention
from quire.kernels.paged_attention import AttentionParams, page_rows


@dataclass(frozen=True, slots=True)
class PagedCrossAttention(StepCrossAttention):
    """Cross-attention of a step to the encoded positions in the paged KV cache.

    Attributes:
        layers: the pages of each layer, which hold the keys and values of encoded positions as well.
        all_rows: attention of all queries of the step.
        logits_rows: attention of the rows `logits_indices`.
    """

    layers: Mapping[int, LayerCache]
    all_rows: QueryAttention
    logits_rows: QueryAttention

    @override
    def __call__(self, layer: int, q: Tensor, params: AttentionParams, *, logits_rows: bool = False) -> Tensor:
        cache = self.layers[layer]
        attend = self.logits_rows if logits_rows else self.all_rows
        return attend(pad_heads(q, cache.shape.key_elements), cache, params)[..., : cache.shape.value_dim]


@dataclass(frozen=True, slots=True)
class _WholeSequence(QueryAttention):
    """Queries of one sequence attend to its `length` encoded positions; `table` (blocks,) int32."""

    table: Tensor
    length: int

    @override
    def __call__(self, q: Tensor, cache: LayerCache, params: AttentionParams) -> Tensor:
        k, v = (read_rows(pages, self.table, self.length, q.dtype) for pages in (cache.keys, cache.values))
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], scale=params.scale)
        return out[0].transpose(0, 1)


def native_cross_attention(layers: Mapping[int, LayerCache], inputs: CrossAttentionInputs) -> PagedCrossAttention:
    """Cross-attention by the compiled decode kernel.

    It shares each load of a sequence's keys among all queries that begin with the same blocks, so the tokens of a
    prompt cost little more than one.
    """
    return PagedCrossAttention(
        layers, DecodeTokens(inputs.tables, inputs.lengths), DecodeTokens(inputs.logits_tables, inputs.logits_lengths)
    )


def reference_cross_attention(
    layers: Mapping[int, LayerCache], spans: Sequence[Span], table: RequestTable
) -> PagedCrossAttention:
    """Cross-attention by torch: generated tokens together, the tokens of each prompt by themselves."""

    def singles(rows: list[int]) -> DecodeTokens:
        lengths = torch.from_numpy(table.cross_lengths[rows])
        width = -(-int(lengths.max()) // table.block_size) if rows else 0
        return DecodeTokens(torch.from_numpy(table.cross_blocks[rows, :width]), lengths)

    generated = [span for span in spans if span.generated]
    rows = [row for span in generated for row in [span.row] * span.count]
    ranges: list[tuple[int, int, QueryAttention]] = [(0, len(rows), singles(rows))] if rows else []
    for span in itertools.dropwhile(lambda span: span.generated, spans):
        length = int(table.cross_lengths[span.row])
        blocks = torch.from_numpy(table.cross_blocks[span.row, : -(-length // table.block_size)])
        ranges.append((span.offset, span.offset + span.count, _WholeSequence(blocks, length)))
    sampling = [span.row for span in spans if span.samples and not span.draft]
    return PagedCrossAttention(layers, SequentialRanges(ranges), singles(sampling))


def read_rows(pages: Tensor, table: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The first `length` keys or values of the blocks in `table`: (heads, length, dim)."""
    return page_rows(pages, table, dtype)[:, :length]


def pad_heads(x: Tensor, elements: int) -> Tensor:
    """(tokens, heads, dim) with zeros appended to each head, up to the head size in pages."""
    return x if x.shape[2] == elements else F.pad(x, (0, elements - x.shape[2]))
