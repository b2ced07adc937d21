"""Attention by FlashInfer: generated tokens in one call, the spans of prompts in another.

The library plans the work of a step on the host, once for all layers with the same parameters. A captured step reads
its plan from tensors at fixed addresses, which the plans of later steps overwrite, so steps with it are captured in
CUDA graphs. A plan depends on the whole batch, and so do the bits of a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from quire.engine.execution.attention.backend import AttentionBackend, PreparedAttention
from quire.engine.execution.attention.libraries import LIBRARIES, load_library
from quire.engine.execution.attention.paged import GroupAttention, PagedAttention, QueryAttention
from quire.engine.execution.cache import KVCache
from quire.engine.execution.cache_layout import LayerCache
from quire.engine.execution.inputs import DeviceMetadata, StepInputs, queries_of
from quire.engine.execution.pinned import PinnedBuffers, new_event
from quire.engine.execution.request_table import RequestTable
from quire.engine.models.errors import UnavailableLibrary
from quire.engine.models.specs.decoder import DecoderSpec, GroupedQueryAttention
from quire.kernels.paged_attention import AttentionParams
from quire.kernels.write_pages import with_dense_rows

_INT32 = 4
_LAYOUT = "HND"  # pages are (blocks, heads, positions, elements), as in `DeviceKVCache`
_PLAN_BYTES = 8 << 20  # of a plan; the library's own size
_PAIR_BYTES = 20 << 20  # of two plans: PyTorch's allocator takes blocks of this size from the device for them


class AttentionKind(NamedTuple):
    """What a plan depends on beside the sequences; see `GroupedQueryAttention`."""

    heads: int
    kv_heads: int
    dim: int
    scale: float
    window: int | None
    softcap: float | None


def attention_kinds(spec: DecoderSpec) -> list[AttentionKind]:
    """The different kinds of attention of a decoder, or of a rank's part of one."""
    kinds: dict[AttentionKind, None] = {}
    for layer in spec.layers:
        attn = layer.attn
        assert isinstance(attn, GroupedQueryAttention)
        kinds[AttentionKind(attn.heads, attn.kv_heads, attn.head_dim, attn.scale, attn.window, attn.softcap)] = None
    return list(kinds)


def flashinfer_bytes(kinds: int, rows: int, blocks: int) -> int:
    """Bytes of the device's memory that `FlashInferAttention` takes.

    Args:
        kinds: kinds of attention of the layers.
        rows: of the request table.
        blocks: blocks of the longest sequence.
    """
    # Each kind has a plan of single tokens, and one of spans that the library allocates. It also allocates one for each
    # wrapper of single tokens, which is freed at once.
    plans = 2 * kinds + 1
    starts, last_lens = rows + 1, rows
    static = _INT32 * (starts + rows * blocks + last_lens)
    return LIBRARIES["flashinfer"].workspace + -(-plans // 2) * _PAIR_BYTES + static


@dataclass(frozen=True, slots=True)
class _PageLists:
    """The blocks of sequences, one sequence behind the other.

    Attributes:
        starts: (sequences + 1,) int32 on the host: where the blocks of each sequence begin, and their number.
        blocks: int32 on the device.
        last_lens: (sequences,) int32 on the host: positions in the last block of each sequence.
    """

    starts: Tensor
    blocks: Tensor
    last_lens: Tensor


class _PlannedCalls:
    """A wrapper of the library: `plan` prepares a step, `run` attends in one of its layers."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self._wrapper = wrapper
        self._copied = new_event(device)

    def plan(self, *args: Any, **options: Any) -> None:
        """Plan the next step."""
        self._copied.synchronize()  # `plan` overwrites the host memory from which the device copies the last plan
        self._wrapper.plan(*args, **options)
        self._copied.record()

    def run(self, q: Tensor, cache: LayerCache) -> Tensor:
        """(tokens, heads, dim) to (tokens, heads, dim)."""
        out: Tensor = self._wrapper.run(q, (cache.keys.transpose(0, 1), cache.values.transpose(0, 1)))
        return out


@dataclass(frozen=True, slots=True)
class _StepQueries(QueryAttention):
    """All queries of a step.

    Attributes:
        count: queries that attend as single tokens, the first ones.
        singles: their calls; spans: those of the other queries. By kind; empty if there are no such queries.
    """

    count: int
    singles: Mapping[AttentionKind, _PlannedCalls]
    spans: Mapping[AttentionKind, _PlannedCalls]

    @override
    def __call__(self, q: Tensor, cache: LayerCache, params: AttentionParams) -> Tensor:
        kind = AttentionKind(q.shape[1], cache.keys.shape[0], q.shape[2], params.scale, params.window, params.softcap)
        q, out = with_dense_rows(q), list[Tensor]()
        if self.singles:
            out.append(self.singles[kind].run(q[: self.count], cache))
        if self.spans:
            out.append(self.spans[kind].run(q[self.count :], cache))
        return out[0] if len(out) == 1 else torch.cat(out)


class FlashInferAttention(AttentionBackend):
    """Attention over the pages of `cache`."""

    def __init__(
        self,
        cache: KVCache,
        table: RequestTable,
        dtype: torch.dtype,
        kinds: Sequence[AttentionKind],
        device: torch.device,
    ) -> None:
        """Compile the kernels, unless the library has them in its cache.

        Args:
            cache: pages of `dtype`.
            table: the sequences in the batch.
            dtype: dtype of queries, keys and values.
            kinds: kinds of attention of the layers.
            device: where the pages are.

        Raises:
            UnavailableLibrary: the library cannot be imported, or cannot compile its kernels.
            UnsupportedModel: it does not compute with `dtype`.
        """
        _, rows, blocks = table.blocks.shape
        self._library = load_library("flashinfer", dtype)
        self._layers = cache.layers
        self._table = table
        self._dtype = dtype
        self._device = device
        self._buffers = PinnedBuffers(device)
        # Zero, as the library demands. All wrappers share it, since their calls follow each other on one stream.
        self._workspace = torch.zeros(LIBRARIES["flashinfer"].workspace, dtype=torch.uint8, device=device)
        # What captured steps read; steps of all sizes and layers of all kinds share it.
        self._static_starts = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._static_blocks = torch.zeros(rows * blocks, dtype=torch.int32, device=device)
        self._static_last_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        # Plans of single tokens. Those of captured steps of all sizes share it as well: each step is planned anew.
        self._plans = {kind: torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=device) for kind in kinds}
        self._singles: dict[tuple[AttentionKind, int], _PlannedCalls] = {}
        self._spans = {kind: self._new_spans() for kind in kinds}
        self._compile()

    def _compile(self) -> None:
        """Plan steps of one token, as the first plan of each kind compiles kernels."""
        pages = self._page_lists(np.zeros(1, np.int64), np.ones(1, np.int64))
        try:
            self._plan_singles(pages, 0)
            self._plan_spans(pages, [1])
        except torch.OutOfMemoryError:
            raise
        except (OSError, RuntimeError) as error:  # e.g. where no compiler of CUDA is found
            cause = f"{type(error).__name__}: {error}"
            raise UnavailableLibrary(f"--attention-backend flashinfer cannot compile its kernels: {cause}") from error

    @override
    def prepare(self, inputs: StepInputs) -> PreparedAttention:
        (group,) = inputs.groups  # a plan has one block table for all layers, see `plan_cache`
        metadata = group.attention
        assert isinstance(metadata, DeviceMetadata), "the inputs were built for another backend"
        queries, count = queries_of(inputs.spans), len(metadata.singles.seq_lens)
        row, start, tokens = (np.array(part, np.int64) for part in (queries.rows, queries.starts, queries.counts))
        length, single = start + tokens, slice(None, queries.singles)
        singles, spans = dict[AttentionKind, _PlannedCalls](), dict[AttentionKind, _PlannedCalls]()
        if count:
            # Padding reads a position of some block: the library has no queries without keys.
            padding = (0, count - queries.singles)
            lists = self._page_lists(np.pad(row[single], padding), np.pad(length[single], padding, constant_values=1))
            singles = self._plan_singles(lists, count if inputs.static else 0)
        if len(row) > queries.singles:
            lists = self._page_lists(row[queries.singles :], length[queries.singles :])
            spans = self._plan_spans(lists, queries.counts[queries.singles :])
        attention = GroupAttention(group.slots, _StepQueries(count, singles, spans))
        attend = PagedAttention(self._layers, [attention], inputs.model.logits_indices)
        return PreparedAttention(attend, inputs.static)

    def _page_lists(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> _PageLists:
        """Of the first `lengths` positions of rows of the request table."""
        size = self._table.block_size
        counts = -(-lengths // size)
        ends = np.cumsum(counts)
        starts = np.concatenate(([0], ends))
        columns = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
        blocks = self._table.blocks[0, np.repeat(rows, counts), columns]
        with self._buffers.next(blocks.nbytes) as (memory, copy):
            memory.view(np.int32)[:] = blocks
            sent = copy(None).view(torch.int32)
        return _PageLists(_host_int32(starts), sent, _host_int32(lengths - (counts - 1) * size))

    def _plan_singles(self, lists: _PageLists, size: int) -> dict[AttentionKind, _PlannedCalls]:
        """Plan a step of single tokens. `size`: their number in captured steps of that size; 0 in other steps."""
        for kind in self._spans:
            if (kind, size) not in self._singles:
                self._singles[kind, size] = self._new_singles(kind, size)
            self._singles[kind, size].plan(
                lists.starts,
                lists.blocks,
                lists.last_lens,
                kind.heads,
                kind.kv_heads,
                kind.dim,
                self._table.block_size,
                **self._options(kind),
            )
        return {kind: self._singles[kind, size] for kind in self._spans}

    def _plan_spans(self, lists: _PageLists, counts: Sequence[int]) -> dict[AttentionKind, _PlannedCalls]:
        """Plan a step of spans of `counts` tokens."""
        query_starts = _host_int32(np.cumsum([0, *counts]))
        for kind, calls in self._spans.items():
            calls.plan(
                query_starts,
                lists.starts,
                lists.blocks,
                lists.last_lens,
                kind.heads,
                kind.kv_heads,
                kind.dim,
                self._table.block_size,
                causal=True,
                **self._options(kind),
            )
        return self._spans

    def _options(self, kind: AttentionKind) -> dict[str, Any]:
        return {
            "pos_encoding_mode": "NONE",
            "window_left": -1 if kind.window is None else kind.window - 1,  # positions before the query's own
            "logits_soft_cap": kind.softcap or 0.0,
            "sm_scale": kind.scale,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }

    def _new_singles(self, kind: AttentionKind, size: int) -> _PlannedCalls:
        """Calls for single tokens, see `_plan_singles`. Tensor cores: the other kernels lack some sizes of groups."""
        fixed = {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": self._static_starts[: size + 1],
            "paged_kv_indices_buffer": self._static_blocks,
            "paged_kv_last_page_len_buffer": self._static_last_lens[:size],
        }
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, _LAYOUT, use_tensor_cores=True, **(fixed if size else {})
        )
        wrapper.reset_workspace_buffer(self._workspace, self._plans[kind])
        return _PlannedCalls(wrapper, self._device)

    def _new_spans(self) -> _PlannedCalls:
        wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, _LAYOUT)
        return _PlannedCalls(wrapper, self._device)


def _host_int32(values: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))
