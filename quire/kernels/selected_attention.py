"""Attention of the tokens of a step to selected positions of their sequences, and their selection by an indexer.

A token is computed from the positions up to its own: its bits do not depend on how many others a step has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import gpu, native
from quire.kernels.capture import empty, split_heads
from quire.kernels.copy_rows import dense_heads
from quire.kernels.int8_pages import scale_bytes
from quire.kernels.paged_attention import AttentionParams, attend_singles, page_rows, supports_pages
from quire.kernels.write_pages import page_dim, supports_rows, triton_supports

_SLICE_RESULTS = 32 << 20  # elements of partial results that a GPU keeps at a time, 128 MiB
_SPLITS = 4  # of the positions of a token, about
SELECTION_BYTES = 384 << 20  # of a GPU's memory for scores, partial results and tables of some tokens at a time


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """Where the tokens of a step are.

    Attributes:
        tables: (sequences, blocks) int32 block tables.
        lengths: (tokens,) int64 the positions of its sequence up to each token's own.
        sequences: (tokens,) int64 the row of the tables of each token; None: each has its own.
        max_len: no length is larger, on a GPU; elsewhere it is not read.
    """

    tables: Tensor
    lengths: Tensor
    sequences: Tensor | None = None
    max_len: int = 0

    def of_rows(self, rows: Tensor) -> TokenPlaces:
        """Return the places of some of the tokens. `rows`: (n,) int64."""
        sequences = rows if self.sequences is None else self.sequences[rows]
        return TokenPlaces(self.tables, self.lengths[rows], sequences, self.max_len)


def select_positions(
    queries: Tensor, weights: Tensor, keys: Tensor, places: TokenPlaces, first: int, top_k: int, key_scale: float
) -> Tensor:
    """The positions with the highest sums over heads of weight * relu(query * key), in ascending order.

    Of equal ones the earlier positions are selected. A token with no more than `top_k` positions has all of them.

    Args:
        queries: (tokens, heads, dim).
        weights: (tokens, heads) float32.
        keys: pages of one head, in whose rows the indexer's keys lie.
        places: those of the tokens.
        first: the element where they begin.
        top_k: number of positions.
        key_scale: of pages of float8.

    Returns:
        (tokens, top_k) int32; those behind the number of a token's positions are undefined.
    """
    if _runs_on_gpu(queries, keys):
        from quire.kernels.triton import selected_attention as kernel

        if kernel.supports(keys, first, queries.shape[2]):
            tables, sequences, lengths = places.tables, places.sequences, places.lengths
            sizes = {"max_len": places.max_len, "first": first, "top_k": top_k}
            return kernel.select_positions(queries, weights, keys, tables, sequences, lengths, **sizes)
    dim, is_int8 = queries.shape[2], keys.dtype is torch.int8
    fits = keys.shape[0] == 1 and dim % native.ATTENTION_VECTOR_WIDTH == 0 and dim <= native.MAX_DIM
    fits = fits and not (is_int8 and first % native.ATTENTION_VECTOR_WIDTH)
    if not fits or not supports_rows(keys, keys, queries):
        return select_reference(queries, weights, keys, places, first, top_k, key_scale)
    positions = empty((len(queries), top_k), torch.int32)
    native.kernels.select_positions(
        queries=queries,
        weights=weights,
        keys=keys,
        block_tables=places.tables,
        sequences=places.sequences,
        seq_lens=places.lengths,
        positions=positions,
        first=first,
    )
    return positions


def select_reference(
    queries: Tensor, weights: Tensor, keys: Tensor, places: TokenPlaces, first: int, top_k: int, key_scale: float
) -> Tensor:
    """`select_positions` in torch."""
    positions = torch.arange(top_k, dtype=torch.int32, device=queries.device).repeat(len(queries), 1)
    for row, rows in _rows(keys, places, queries.dtype, key_scale):
        if len(rows) > top_k:
            index_keys = rows[:, first : first + queries.shape[2]]
            scores = (index_keys.float() @ queries[row].float().mT).relu_() @ weights[row]
            least = scores.topk(top_k).values[-1]
            above = scores > least
            equal = (scores == least).nonzero()[: top_k - int(above.sum())]
            positions[row] = torch.cat((above.nonzero(), equal)).flatten().sort().values
    return positions


def attend_selected(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    places: TokenPlaces,
    positions: Tensor,
    key_dim: int,
    params: AttentionParams,
) -> Tensor:
    """Attend to selected positions.

    Args:
        q: (tokens, heads, dim), of which elements behind `key_dim` are zeros.
        keys: pages of one head.
        values: the first elements of the keys.
        places: those of the tokens.
        positions: (tokens, top_k) int32, see `select_positions`.
        key_dim: elements of keys that attention reads.
        params: scales.

    Returns:
        (tokens, heads, elements of a value in the pages).
    """
    if _runs_on_gpu(q, keys):
        return _attend_to_rows(q, keys, values, places, positions, key_dim, params)
    if not (keys.shape[0] == 1 and supports_pages(keys, values) and supports_rows(keys, values, q)):
        return attend_reference(q, keys, values, places, positions, params)
    if key_dim % native.ATTENTION_VECTOR_WIDTH == 0:
        keys = _first_elements(keys, key_dim)
        q = split_heads(dense_heads(q[..., :key_dim]), q.shape[1], key_dim)
    out = empty((*q.shape[:2], page_dim(values)), q.dtype)
    native.kernels.attend_selected(
        q=q,
        keys=keys,
        values=values,
        out=out,
        block_tables=places.tables,
        sequences=places.sequences,
        seq_lens=places.lengths,
        positions=positions,
        scale=params.scale,
    )
    return out


def _runs_on_gpu(x: Tensor, pages: Tensor) -> bool:
    return gpu.supports(x, pages) and triton_supports(pages, pages)


def _attend_to_rows(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    places: TokenPlaces,
    positions: Tensor,
    key_dim: int,
    params: AttentionParams,
) -> Tensor:
    """Attend on a GPU: the rows of selected positions are pages of one row, in the block tables of single tokens."""
    (block, row), size = keys.stride()[1:3], keys.shape[2]
    unit = math.gcd(block, row)
    blocks = (positions // size).long().clamp(max=places.tables.shape[1] - 1)
    if places.sequences is None:
        tables = places.tables.gather(1, blocks)
    else:
        tables = places.tables[places.sequences[:, None], blocks]
    rows = tables * (block // unit) + positions % size * (row // unit)
    lengths = places.lengths.clamp(max=positions.shape[1])
    key_rows, value_rows = (
        part.as_strided((1, 1, 1, part.shape[3]), (part.stride(0), unit, row, 1), part.storage_offset())
        for part in (_first_elements(keys, key_dim), values)
    )
    size = max(1, _SLICE_RESULTS // (_SPLITS * q.shape[1] * page_dim(values)))
    out = [
        attend_singles(part, key_rows, value_rows, tables, length, positions.shape[1], params)
        for part, tables, length in zip(
            q[..., :key_dim].split(size), rows.int().split(size), lengths.split(size), strict=True
        )
    ]
    return out[0] if len(out) == 1 else torch.cat(out)


def _first_elements(pages: Tensor, dim: int) -> Tensor:
    """The first elements of the rows of pages, with their scales."""
    if pages.dtype is not torch.int8:
        return pages[..., :dim]
    begin = scale_bytes(page_dim(pages))
    return pages[..., begin - scale_bytes(dim) : begin + dim]


def attend_reference(
    q: Tensor, keys: Tensor, values: Tensor, places: TokenPlaces, positions: Tensor, params: AttentionParams
) -> Tensor:
    """`attend_selected` in torch."""
    value_dim = page_dim(values)
    out = q.new_empty((*q.shape[:2], value_dim))
    for row, rows in _rows(keys, places, q.dtype, params.key_scale):
        seen = rows[positions[row, : min(len(rows), positions.shape[1])].long()].float()
        weights = ((q[row].float() @ seen.mT) * params.scale).softmax(-1)
        out[row] = (weights @ seen[:, :value_dim]).to(q.dtype)
    return out


def _rows(keys: Tensor, places: TokenPlaces, dtype: torch.dtype, key_scale: float) -> Iterator[tuple[int, Tensor]]:
    """Yield each token with the cached keys (positions, dim) up to its own, in a dtype if they are stored in another.

    Neighbours of a sequence share them.
    """
    sequences = list(range(len(places.lengths))) if places.sequences is None else places.sequences.tolist()
    for sequence, group in itertools.groupby(
        zip(sequences, enumerate(places.lengths.tolist()), strict=False), lambda item: item[0]
    ):
        tokens = [token for _, token in group]
        blocks = places.tables[sequence, : -(-max(length for _, length in tokens) // keys.shape[2])]
        rows = page_rows(keys, blocks, dtype, key_scale)[0]
        yield from ((token, rows[:length]) for token, length in tokens)
