"""Attention of the tokens of a step to selected positions of their sequences; see `Selection`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.engine.execution.cache_layout import LayerCache
from quire.engine.models.layers.inputs import Selection
from quire.kernels.paged_attention import AttentionParams, page_rows
from quire.kernels.selected_attention import attend_to, select_positions


@dataclass(frozen=True, slots=True)
class Place:
    """Where a token is: the block table of its sequence, and the number of positions up to its own."""

    table: Tensor
    length: int


def attend_selected(
    q: Tensor, out: Tensor, cache: LayerCache, params: AttentionParams, selection: Selection, places: Sequence[Place]
) -> None:
    """Attend to selected positions, in the rows of a step that have more positions than are selected.

    Args:
        q: (tokens, heads, dim).
        out: (tokens, heads, elements of a value in the pages), of which these rows are written.
        cache: the layer's pages.
        params: scales.
        selection: what selects, or the positions that an earlier layer has selected.
        places: those of all rows.
    """
    queries = None if selection.queries is None else selection.queries()
    for row, keys in _rows(cache, params, selection, places):
        length = places[row].length
        if queries is not None:
            index_keys = keys[:length, selection.key_dim : selection.key_dim + queries.queries.shape[-1]]
            selection.positions[row] = select_positions(
                queries.queries[row], queries.weights[row], index_keys, selection.top_k
            )
        seen = keys[selection.positions[row], : selection.key_dim]
        value_dim = cache.shape.value_dim
        out[row, :, :value_dim] = attend_to(q[row, :, : selection.key_dim], seen, value_dim, params.scale)


def _rows(
    cache: LayerCache, params: AttentionParams, selection: Selection, places: Sequence[Place]
) -> Iterator[tuple[int, Tensor]]:
    """The rows that have more positions than are selected, with the cached keys (positions, dim) of their sequences.

    Those of neighbouring rows of one sequence are gathered together.
    """
    longer = [(row, place) for row, place in enumerate(places) if place.length > selection.top_k]
    for _, group in itertools.groupby(longer, lambda item: item[1].table.data_ptr()):
        rows = list(group)
        most = max(place.length for _, place in rows)
        blocks = rows[0][1].table[: -(-most // cache.keys.shape[2])]
        keys = page_rows(cache.keys, blocks, cache.keys.dtype, params.key_scale)[0]
        yield from ((row, keys) for row, _ in rows)
