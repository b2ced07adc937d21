"""Attention by FlashAttention-2: generated tokens in one call, the spans of prompts in another.

It reads pages in place: all strides but the last are arguments of its kernels. Everything that differs between steps of
one size is in tensors, so steps with it are captured in CUDA graphs. The number of parts into which it splits a
sequence depends on the batch, and so do the bits of a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from quire.engine.execution.attention.backend import AttentionBackend, PreparedAttention
from quire.engine.execution.attention.libraries import load_library
from quire.engine.execution.attention.paged import GroupAttention, PagedAttention, QueryAttention
from quire.engine.execution.cache import KVCache
from quire.engine.execution.cache_layout import LayerCache
from quire.engine.execution.inputs import DeviceMetadata, StepInputs
from quire.kernels.paged_attention import AttentionParams
from quire.kernels.write_pages import with_dense_rows


@dataclass(frozen=True, slots=True)
class _StepQueries(QueryAttention):
    """All queries of a step.

    Attributes:
        library: the module flash_attn.
        key_starts: (spans + 1,) int32, sums of the lengths of the sequences of spans; None if there are no spans.
        longest_span: tokens of the longest span.
    """

    library: Any
    metadata: DeviceMetadata
    key_starts: Tensor | None
    longest_span: int

    @override
    def __call__(self, q: Tensor, cache: LayerCache, params: AttentionParams) -> Tensor:
        singles, spans = self.metadata.singles, self.metadata.spans
        count, out = len(singles.seq_lens), list[Tensor]()
        q, keys, values = with_dense_rows(q), _pages(cache.keys), _pages(cache.values)
        options = {
            "softmax_scale": params.scale,
            "causal": True,
            # positions before a query's own, and after it
            "window_size": (-1, -1) if params.window is None else (params.window - 1, 0),
            "softcap": params.softcap or 0.0,
            "alibi_slopes": params.alibi,
        }
        if count:
            attended = self.library.flash_attn_with_kvcache(
                q[:count, None],
                keys,
                values,
                cache_seqlens=singles.seq_lens,
                block_table=singles.block_tables,
                **options,
            )
            out.append(attended[:, 0])
        if self.key_starts is not None:
            out.append(
                self.library.flash_attn_varlen_func(
                    q[count:],
                    keys,
                    values,
                    cu_seqlens_q=self.metadata.query_starts,
                    cu_seqlens_k=self.key_starts,
                    max_seqlen_q=self.longest_span,
                    max_seqlen_k=self.metadata.max_seq_len,
                    block_table=spans.block_tables,
                    **options,
                )
            )
        return out[0] if len(out) == 1 else torch.cat(out)


def _pages(pages: Tensor) -> Tensor:
    """A view (blocks, block_size, kv_heads, dim) of pages."""
    return pages.permute(1, 2, 0, 3)


class FlashAttention(AttentionBackend):
    """Attention over the pages of `cache`."""

    def __init__(self, cache: KVCache, dtype: torch.dtype) -> None:
        """`dtype`: dtype of queries, keys and values.

        Raises:
            UnavailableLibrary: the library cannot be imported.
            UnsupportedModel: it does not compute with `dtype`.
        """
        self._layers = cache.layers
        self._library = load_library("flash_attn", dtype)

    @override
    def prepare(self, inputs: StepInputs) -> PreparedAttention:
        longest = max((span.count for span in inputs.spans if not span.generated), default=0)
        key_starts, groups = None, list[GroupAttention]()
        for group in inputs.groups:
            metadata = group.attention
            assert isinstance(metadata, DeviceMetadata), "the inputs were built for another backend"
            lengths = metadata.spans.seq_lens  # the same in all groups
            if len(lengths) and key_starts is None:
                key_starts = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
            groups.append(GroupAttention(group.slots, _StepQueries(self._library, metadata, key_starts, longest)))
        return PreparedAttention(PagedAttention(self._layers, groups, inputs.model.logits_indices), inputs.static)
