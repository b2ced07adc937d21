"""The CPU with Quire's compiled kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from typing_extensions import override

from quire.config.options import EngineOptions
from quire.engine.execution.attention.backend import AttentionBackend
from quire.engine.execution.attention.native import NativeAttention, supports_cache
from quire.engine.execution.attention.reference import ReferenceAttention
from quire.engine.execution.cache import HostKVCache, KVCache
from quire.engine.execution.cache_layout import CacheLayout
from quire.engine.execution.devices.host import HostDevice
from quire.engine.execution.inputs import InputBuilder, NativeInputBuilder
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.step_graphs import MAX_TOKENS, StepGraphs, StepRunner
from quire.engine.models.networks.decoder import LanguageModel
from quire.kernels import native


class CpuDevice(HostDevice):
    """The CPU with compiled kernels."""

    name = "cpu"
    torch_device = torch.device("cpu")
    quantizable_dtypes = frozenset(native.DTYPES)
    computes_float16 = False
    cache_alignment = native.ATTENTION_VECTOR_WIDTH
    row_alignment = 1

    def __init__(self) -> None:
        self.computes_bfloat16 = native.has_bfloat16()
        self.description = f"compiled kernels for {native.instructions()}"

    @override
    def activate(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def allocate_cache(
        self, layout: CacheLayout, num_blocks: int, block_size: int, dtype: torch.dtype, prefault: int
    ) -> KVCache:
        return HostKVCache(layout, num_blocks, block_size, dtype, prefault)

    @override
    def input_builder(self, table: RequestTable, options: EngineOptions) -> InputBuilder:
        return NativeInputBuilder(table, MAX_TOKENS)

    @override
    def attention(
        self, cache: KVCache, table: RequestTable, model: LanguageModel, dtype: torch.dtype, options: EngineOptions
    ) -> AttentionBackend:
        # pages of other shapes than the kernels read are gathered
        return (
            NativeAttention(cache, table, dtype) if supports_cache(cache, dtype) else ReferenceAttention(cache, table)
        )

    @override
    def step_runner(self, model: LanguageModel, inputs: InputBuilder, attention: AttentionBackend) -> StepRunner:
        return StepGraphs(model)
