"""The places of the tokens of a step, in groups of layers whose tokens attend to selected ones; see `Selection`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.engine.execution.cache_layout import CacheLayout
from quire.engine.execution.inputs import DeviceMetadata
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


def places_on_device(metadata: DeviceMetadata, tokens: int, top_k: int) -> TokenPlaces | None:
    """Return the places of the tokens of a step on a GPU; None: no token has more than `top_k`.

    Args:
        metadata: generated tokens, then spans of prompts.
        tokens: number of all tokens.
        top_k: number of tokens that are selected.
    """
    longest, singles, spans = metadata.max_seq_len, metadata.singles, metadata.spans
    if longest <= top_k:
        return None
    count, device = len(singles.seq_lens), singles.seq_lens.device
    if not len(spans.seq_lens):
        return TokenPlaces(singles.block_tables, singles.seq_lens, max_len=longest)
    rows, seen = tokens_of_spans(metadata, tokens - count)
    return TokenPlaces(
        torch.cat((singles.block_tables, spans.block_tables)),
        torch.cat((singles.seq_lens.long(), seen)),
        torch.cat((torch.arange(count, device=device), rows + count)),
        longest,
    )


def tokens_of_spans(metadata: DeviceMetadata, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the span of each of the last tokens of a step, and the positions up to its own: (tokens,) int64 each.

    `tokens`: those of all spans.
    """
    starts = metadata.query_starts.long()
    spans = torch.arange(len(starts) - 1, device=starts.device).repeat_interleave(starts.diff(), output_size=tokens)
    ends = starts[1:][spans] - starts[0]
    behind = ends - 1 - torch.arange(tokens, device=starts.device)
    return spans, metadata.spans.seq_lens.long()[spans] - behind
