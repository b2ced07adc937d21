"""Stand-ins for FlashAttention 2 and FlashInfer on the CPU: their signatures and restrictions, computed by torch.

They compute in float32, and unlike the libraries accept float32 queries and pages, so that tokens can be compared with
those of transformers. `install` lets Quire import them and pass float32 on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from quire.engine.execution.attention import libraries

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_FLASH_ATTN_BLOCK = 256  # block sizes are multiples of it


class Calls:
    """How often each function of the libraries was called."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1


def install(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Let `import flash_attn` and `import flashinfer` find the stand-ins, and accept float32."""
    calls = Calls()
    for name, make in MODULES.items():
        monkeypatch.setitem(sys.modules, name, make(calls))
    patched = {name: replace(library, dtypes=DTYPES, workspace=1024) for name, library in libraries.LIBRARIES.items()}
    for name, library in patched.items():
        monkeypatch.setitem(as_dict(libraries.LIBRARIES), name, library)
    return calls


def as_dict(mapping: Mapping[str, Any]) -> dict[str, Any]:
    assert isinstance(mapping, dict)
    return mapping


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window_left: int = -1,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
) -> Tensor:
    """Causal attention of q (tokens, heads, dim), the last positions of k and v (positions, kv_heads, dim)."""
    group, length = q.shape[1] // k.shape[1], len(k)
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(length) - torch.arange(length - len(q), length)[:, None]
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance.abs()
    hidden = distance > 0
    if window_left >= 0:
        hidden |= distance < -window_left
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


def _on_device(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that reads values as a kernel does: `RefuseWaiting` does not see it."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def flash_attn_module(calls: Calls) -> ModuleType:
    """The module flash_attn, with the functions that Quire uses."""

    @_on_device
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        calls.count("flash_attn_varlen_func")
        assert block_table is not None
        assert softmax_scale is not None
        _check_flash_attn(q, k, v, block_table, causal=causal, window=window_size, slopes=alibi_slopes)
        for starts in (cu_seqlens_q, cu_seqlens_k):
            assert starts.dtype == torch.int32
            assert starts.is_contiguous()
            assert starts.shape == (len(block_table) + 1,)
        query_starts, lengths = cu_seqlens_q.tolist(), cu_seqlens_k.diff().tolist()
        assert query_starts[-1] == len(q)
        assert max(cu_seqlens_q.diff().tolist()) <= max_seqlen_q
        assert max(lengths) <= max_seqlen_k
        out = [
            attend(
                q[query_starts[i] : query_starts[i + 1]],
                *_rows(k, v, block_table[i], length),
                scale=softmax_scale,
                window_left=window_size[0],
                softcap=softcap,
                slopes=alibi_slopes,
            )
            for i, length in enumerate(lengths)
        ]
        return torch.cat(out)

    @_on_device
    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: int | Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Tensor | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        calls.count("flash_attn_with_kvcache")
        assert block_table is not None
        assert softmax_scale is not None
        assert isinstance(cache_seqlens, Tensor)
        assert q.ndim == 4
        assert (cache_seqlens.dtype, cache_seqlens.shape) == (torch.int32, (len(q),))
        assert cache_seqlens.is_contiguous()
        _check_flash_attn(
            q.flatten(0, 1), k_cache, v_cache, block_table, causal=causal, window=window_size, slopes=alibi_slopes
        )
        out = torch.zeros_like(q)  # also of sequences without positions
        for i, length in enumerate(cache_seqlens.tolist()):
            if length:
                out[i] = attend(
                    q[i],
                    *_rows(k_cache, v_cache, block_table[i], length),
                    scale=softmax_scale,
                    window_left=window_size[0],
                    softcap=softcap,
                    slopes=alibi_slopes,
                )
        return out

    module: Any = ModuleType("flash_attn")
    module.__version__ = "2.8.3"
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module  # type: ignore[no-any-return]


def _check_flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    *,
    causal: bool,
    window: tuple[int, int],
    slopes: Tensor | None,
) -> None:
    assert causal
    assert q.dtype in DTYPES
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    blocks, block_size, kv_heads, dim = k.shape
    assert v.shape == k.shape
    assert block_size % _FLASH_ATTN_BLOCK == 0, "Paged KV cache block size must be divisible by 256"
    assert dim % 8 == 0, "the library would copy the whole cache"
    assert dim <= 256
    assert q.shape[-1] == dim
    assert q.shape[-2] % kv_heads == 0
    assert block_table.dtype == torch.int32
    assert block_table.stride(-1) == 1
    assert int(block_table.min()) >= 0
    assert int(block_table.max()) < blocks
    assert window == (-1, -1) or (window[0] >= 0 and window[1] == 0)
    assert slopes is None or (slopes.dtype, slopes.shape) == (torch.float32, q.shape[-2:-1])


def _rows(k: Tensor, v: Tensor, table: Tensor, length: int) -> Iterator[Tensor]:
    """The first positions of a sequence: (positions, kv_heads, dim) of pages (blocks, block_size, kv_heads, dim)."""
    blocks = table[: -(-length // k.shape[1])].long()
    return (pages[blocks].flatten(0, 1)[:length] for pages in (k, v))


def flashinfer_module(calls: Calls) -> ModuleType:
    """The module flashinfer, with the classes that Quire uses."""

    class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
        def __init__(
            self,
            float_workspace_buffer: Tensor,
            kv_layout: str = "NHD",
            use_cuda_graph: bool = False,
            use_tensor_cores: bool = False,
            paged_kv_indptr_buffer: Tensor | None = None,
            paged_kv_indices_buffer: Tensor | None = None,
            paged_kv_last_page_len_buffer: Tensor | None = None,
            backend: str = "auto",
            jit_args: list[Any] | None = None,
        ) -> None:
            fixed = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
            super().__init__(float_workspace_buffer, kv_layout, fixed if use_cuda_graph else None)

        def plan(
            self,
            indptr: Tensor,
            indices: Tensor,
            last_page_len: Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim: int,
            page_size: int,
            pos_encoding_mode: str = "NONE",
            window_left: int = -1,
            logits_soft_cap: float | None = None,
            q_data_type: torch.dtype = torch.float16,
            kv_data_type: torch.dtype | None = None,
            data_type: torch.dtype | None = None,
            sm_scale: float | None = None,
            rope_scale: float | None = None,
            rope_theta: float | None = None,
            non_blocking: bool = True,
        ) -> None:
            calls.count("decode plan")
            self.take_pages(indptr, indices, last_page_len)
            self.query_starts = torch.arange(len(last_page_len) + 1)
            self.take_options(
                (num_qo_heads, num_kv_heads, head_dim, page_size),
                (pos_encoding_mode, window_left, logits_soft_cap, sm_scale),
                (q_data_type, kv_data_type),
            )

        def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
            calls.count("decode run")
            return self.attend(q, paged_kv_cache)

    class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
        def __init__(
            self,
            float_workspace_buffer: Tensor,
            kv_layout: str = "NHD",
            use_cuda_graph: bool = False,
            qo_indptr_buf: Tensor | None = None,
            paged_kv_indptr_buf: Tensor | None = None,
            paged_kv_indices_buf: Tensor | None = None,
            paged_kv_last_page_len_buf: Tensor | None = None,
            custom_mask_buf: Tensor | None = None,
            mask_indptr_buf: Tensor | None = None,
            backend: str = "auto",
            jit_args: list[Any] | None = None,
            jit_kwargs: dict[str, Any] | None = None,
        ) -> None:
            assert not use_cuda_graph
            super().__init__(float_workspace_buffer, kv_layout, None)

        def plan(
            self,
            qo_indptr: Tensor,
            paged_kv_indptr: Tensor,
            paged_kv_indices: Tensor,
            paged_kv_last_page_len: Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim_qk: int,
            page_size: int,
            head_dim_vo: int | None = None,
            custom_mask: Tensor | None = None,
            packed_custom_mask: Tensor | None = None,
            causal: bool = False,
            pos_encoding_mode: str = "NONE",
            use_fp16_qk_reduction: bool = False,
            sm_scale: float | None = None,
            window_left: int = -1,
            logits_soft_cap: float | None = None,
            rope_scale: float | None = None,
            rope_theta: float | None = None,
            q_data_type: torch.dtype = torch.float16,
            kv_data_type: torch.dtype | None = None,
            non_blocking: bool = True,
        ) -> None:
            calls.count("prefill plan")
            assert causal
            self.take_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
            assert qo_indptr.dtype == torch.int32
            assert len(qo_indptr) == len(paged_kv_indptr)
            self.query_starts = qo_indptr
            self.take_options(
                (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
                (pos_encoding_mode, window_left, logits_soft_cap, sm_scale),
                (q_data_type, kv_data_type),
            )

        def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
            calls.count("prefill run")
            return self.attend(q, paged_kv_cache)

    module: Any = ModuleType("flashinfer")
    module.__version__ = "0.7.2"
    module.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    return module  # type: ignore[no-any-return]


class _Wrapper:
    """What both wrappers of FlashInfer have in common.

    As in captured graphs, `attend` reads the lists of pages where they were put by the last plan: in the fixed buffers,
    if there are any.
    """

    def __init__(self, workspace: Tensor, layout: str, fixed: tuple[Tensor | None, ...] | None) -> None:
        assert not workspace.any(), "Must be initialized to 0 for its first use"
        assert layout == "HND"
        self._fixed = None if fixed is None else tuple(array for array in fixed if array is not None)
        if self._fixed is not None:
            starts, _, last_lens = self._fixed
            assert len(starts) == len(last_lens) + 1
        self._pages: tuple[Tensor, ...] = ()
        self.query_starts = torch.zeros(1)
        self._sizes: tuple[int, ...] = ()
        self._options: tuple[Any, ...] = ()
        self._dtype = torch.float16

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8

    def take_pages(self, starts: Tensor, indices: Tensor, last_lens: Tensor) -> None:
        pages = (starts, indices, last_lens)
        assert all(page.dtype == torch.int32 for page in pages)
        assert starts.device.type == last_lens.device.type == "cpu", "a plan would wait for the device"
        assert len(indices) == starts[-1]
        assert int(starts.diff().min()) >= 1
        if self._fixed is None:
            self._pages = pages
            return
        assert len(last_lens) == len(self._fixed[2]), "The batch size should be fixed in cudagraph mode"
        assert len(indices) <= len(self._fixed[1])
        for buffer, page in zip(self._fixed, pages, strict=True):
            buffer[: len(page)].copy_(page)
        self._pages = self._fixed

    def take_options(
        self, sizes: tuple[int, ...], options: tuple[Any, ...], dtypes: tuple[torch.dtype, torch.dtype | None]
    ) -> None:
        heads, kv_heads, dim, _ = sizes
        encoding, _, _, scale = options
        assert heads % kv_heads == 0
        assert dim in (64, 128, 256)
        assert encoding == "NONE"
        assert scale is not None
        assert dtypes[0] == dtypes[1]
        assert dtypes[0] in DTYPES
        if self._fixed is not None and self._sizes:
            assert (self._sizes, self._options) == (sizes, options), "captured kernels have these as constants"
        self._sizes, self._options, self._dtype = sizes, options, dtypes[0]

    def attend(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        heads, kv_heads, dim, page_size = self._sizes
        _, window_left, softcap, scale = self._options
        starts, indices, last_lens = (page.tolist() for page in self._pages)
        query_starts = self.query_starts.tolist()
        assert q.shape == (query_starts[-1], heads, dim)
        for pages in paged_kv_cache:
            assert q.dtype == pages.dtype == self._dtype
            assert pages.shape[1:] == (kv_heads, page_size, dim)
            assert pages[0].is_contiguous()
        assert paged_kv_cache[0].stride() == paged_kv_cache[1].stride(), "k/v strides must be identical"
        out = []
        for i, last in enumerate(last_lens):
            blocks = indices[starts[i] : starts[i + 1]]
            length = (len(blocks) - 1) * page_size + last
            k, v = (pages[blocks].transpose(1, 2).flatten(0, 1)[:length] for pages in paged_kv_cache)
            queries = q[query_starts[i] : query_starts[i + 1]]
            out.append(attend(queries, k, v, scale=scale, window_left=window_left, softcap=softcap or 0.0))
        return torch.cat(out)


MODULES: Mapping[str, Callable[[Calls], ModuleType]] = {
    "flash_attn": flash_attn_module,
    "flashinfer": flashinfer_module,
}
