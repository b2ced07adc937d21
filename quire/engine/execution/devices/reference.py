"""The CPU with torch alone: for installations without compiled kernels, and to compare other devices with."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from typing_extensions import override

from quire.config.options import EngineOptions
from quire.engine.execution.attention.backend import AttentionBackend
from quire.engine.execution.attention.reference import ReferenceAttention
from quire.engine.execution.cache import HostKVCache, KVCache
from quire.engine.execution.cache_layout import CacheLayout
from quire.engine.execution.devices.host import HostDevice
from quire.engine.execution.inputs import InputBuilder, NumpyInputBuilder
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.step_graphs import EagerSteps, StepRunner
from quire.engine.models.networks.decoder import LanguageModel
from quire.kernels import native


class ReferenceDevice(HostDevice):
    """The CPU with PyTorch's operations alone."""

    name = "reference"
    torch_device = torch.device("cpu")
    quantizable_dtypes: frozenset[torch.dtype] = frozenset()
    computes_bfloat16 = False
    computes_float16 = False
    cache_alignment = 1
    row_alignment = 1
    description = "torch reference kernels"

    @override
    def activate(self) -> AbstractContextManager[None]:
        return native.disabled()

    @override
    def allocate_cache(
        self, layout: CacheLayout, num_blocks: int, block_size: int, dtype: torch.dtype, prefault: int
    ) -> KVCache:
        return HostKVCache(layout, num_blocks, block_size, dtype)

    @override
    def input_builder(self, table: RequestTable, options: EngineOptions) -> InputBuilder:
        return NumpyInputBuilder(table)

    @override
    def attention(
        self, cache: KVCache, table: RequestTable, model: LanguageModel, dtype: torch.dtype, options: EngineOptions
    ) -> AttentionBackend:
        return ReferenceAttention(cache, table)

    @override
    def step_runner(self, model: LanguageModel, inputs: InputBuilder, attention: AttentionBackend) -> StepRunner:
        return EagerSteps(model)
