"""The places of the tokens of a step, in groups of layers whose tokens attend to selected ones; see `Selection`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.engine.execution.cache_layout import CacheLayout
from quire.engine.models.specs.cache import IndexedCache
from quire.kernels.selected_attention import TokenPlaces


def selected_counts(layout: CacheLayout) -> list[int | None]:
    """Return how many tokens are selected in each group that grows; None: they are not.

    Where no group grows there is one, see `chunk_sizes`.
    """
    return [group.kind.top_k if isinstance(group.kind, IndexedCache) else None for group in layout.growing] or [None]


def places_of_spans(tables: Tensor, lengths: Sequence[int], counts: Sequence[int], top_k: int) -> TokenPlaces | None:
    """Return the places of consecutive tokens at the last positions of sequences; None: no token has more than `top_k`.

    Args:
        tables: (spans, blocks) int32 block tables.
        lengths: positions of each sequence, those of the span included.
        counts: tokens of each span.
        top_k: number of tokens that are selected.
    """
    if max(lengths, default=0) <= top_k:
        return None
    seen = [
        torch.arange(length - count + 1, length + 1) for length, count in zip(lengths, counts, strict=True) if count > 0
    ]
    return TokenPlaces(tables, torch.cat(seen), torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)))
