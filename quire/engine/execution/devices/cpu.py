"""The CPU with Quire's compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from quire.engine.execution.attention.backend import AttentionBackend
from quire.engine.execution.attention.native import NativeAttention, supports_cache
from quire.engine.execution.attention.reference import ReferenceAttention
from quire.engine.execution.cache import HostKVCache, KVCache
from quire.engine.execution.inputs import InputBuilder, NativeInputBuilder
from quire.engine.execution.memory import free_memory
from quire.engine.execution.step_graphs import MAX_TOKENS, StepGraphs, StepRunner
from quire.engine.execution.table import RequestTable
from quire.engine.models.decoder import CacheShape, LanguageModel
from quire.kernels import native


class CpuDevice:
    """See `Device`."""

    torch_device = torch.device("cpu")
    quantizable_dtypes = frozenset(native.DTYPES)
    cache_alignment = native.PAIR

    def __init__(self) -> None:
        self.computes_bfloat16 = native.has_bfloat16()
        self.description = f"compiled kernels for {native.instructions()}"

    def activate(self) -> AbstractContextManager[None]:
        """See `Device`."""
        return nullcontext()

    def free_memory(self) -> int:
        """See `Device`."""
        return free_memory()

    def allocate_cache(
        self, shapes: Sequence[CacheShape], num_blocks: int, block_size: int, dtype: torch.dtype, prefault: int
    ) -> KVCache:
        """See `Device`."""
        return HostKVCache(shapes, num_blocks, block_size, dtype, prefault)

    def input_builder(self, table: RequestTable) -> InputBuilder:
        """See `Device`."""
        return NativeInputBuilder(table, MAX_TOKENS)

    def attention(self, cache: KVCache, table: RequestTable, dtype: torch.dtype) -> AttentionBackend:
        """See `Device`; pages of other shapes than the kernels read are gathered."""
        return (
            NativeAttention(cache, table, dtype) if supports_cache(cache, dtype) else ReferenceAttention(cache, table)
        )

    def step_runner(self, model: LanguageModel) -> StepRunner:
        """See `Device`."""
        return StepGraphs(model)
