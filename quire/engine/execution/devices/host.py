"""The devices of the host: its CPU with compiled kernels, and with torch alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from typing_extensions import override

from quire.allocator import return_freed_memory
from quire.config.options import EngineOptions
from quire.engine.execution.attention.backend import AttentionBackend
from quire.engine.execution.attention.native import NativeAttention, supports_cache
from quire.engine.execution.attention.reference import ReferenceAttention
from quire.engine.execution.cache import CacheMemory, HostKVCache, KVCache
from quire.engine.execution.cache_layout import CacheLayout
from quire.engine.execution.devices.device import Device
from quire.engine.execution.executor import BackgroundExecutor, BackgroundRunner, Executor, ParallelExecutor, Runner
from quire.engine.execution.inputs import InputBuilder, NativeInputBuilder, NumpyInputBuilder
from quire.engine.execution.memory import MemoryShare, free_memory
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.sampling.pending import TokenSampler
from quire.engine.execution.sampling.sampler import GrammarStates, Sampler
from quire.engine.execution.states import StateCaches
from quire.engine.execution.step_graphs import MAX_TOKENS, EagerSteps, StepGraphs, StepRunner
from quire.engine.models.networks.decoder import LanguageModel
from quire.kernels import native


class HostDevice(Device):
    """A device that computes with the cores and the memory of the host."""

    torch_device = torch.device("cpu")
    computes_float16 = False
    row_alignment = 1
    compiles_kernels = False
    has_memory = False
    attention_backends = ("auto",)

    @override
    def cache_memory(
        self, options: EngineOptions, share: MemoryShare | None, reserved: int, largest_step: Callable[[], None]
    ) -> CacheMemory:
        available = (free_memory() if share is None else share.host_bytes) - reserved
        if options.gpu_memory_utilization is not None:  # vLLM's flag, in command lines that were written for it
            return CacheMemory(int(available * options.gpu_memory_utilization), "--gpu-memory-utilization")
        return CacheMemory(int(available * options.kv_cache_free_memory_fraction), "--kv-cache-free-memory-fraction")

    @override
    def attention_bytes(self, model: LanguageModel, options: EngineOptions, context_len: int) -> int:
        return 0

    @override
    def sampler_bytes(self, rows: int, vocab_size: int) -> int:
        return 0  # the logits processors allocate what the requests need

    @override
    def sampler(
        self, table: RequestTable, vocab_size: int, grammar_states: GrammarStates, inputs: InputBuilder
    ) -> TokenSampler:
        return Sampler(table, vocab_size, grammar_states)

    @override
    def release_memory(self) -> None:
        return_freed_memory()

    @override
    def executor(self, runner: BackgroundRunner, cache: KVCache, max_steps_in_flight: int) -> Executor:
        return BackgroundExecutor(self.activate, runner, max_steps_in_flight, cache)

    @override
    def encoder_executor(self, runner: Runner) -> ParallelExecutor:
        return ParallelExecutor(self.activate, runner)


class CpuDevice(HostDevice):
    """The CPU with Quire's compiled kernels."""

    name = "cpu"
    quantizable_dtypes = frozenset(native.DTYPES)
    cache_alignment = native.ATTENTION_VECTOR_WIDTH

    def __init__(self) -> None:
        self.computes_bfloat16 = native.has_bfloat16()
        self.description = f"compiled kernels for {native.instructions()}"

    @override
    def activate(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def allocate_cache(
        self, layout: CacheLayout, num_blocks: int, block_size: int, dtype: torch.dtype, prefault: int, slots: int
    ) -> KVCache:
        return HostKVCache(layout, num_blocks, block_size, dtype, prefault, slots)

    @override
    def input_builder(self, table: RequestTable, options: EngineOptions) -> InputBuilder:
        return NativeInputBuilder(table, MAX_TOKENS)

    @override
    def attention(
        self, cache: KVCache, table: RequestTable, model: LanguageModel, dtype: torch.dtype, options: EngineOptions
    ) -> AttentionBackend:
        # pages of other shapes than the kernels read are gathered
        return (
            NativeAttention(cache, table, dtype, MAX_TOKENS)
            if supports_cache(cache, dtype)
            else ReferenceAttention(cache, table)
        )

    @override
    def step_runner(
        self,
        model: LanguageModel,
        inputs: InputBuilder,
        attention: AttentionBackend,
        states: StateCaches | None = None,
    ) -> StepRunner:
        return StepGraphs(model, attention)


class ReferenceDevice(HostDevice):
    """The CPU with torch alone: for installations without compiled kernels, and to compare other devices with."""

    name = "reference"
    quantizable_dtypes: frozenset[torch.dtype] = frozenset()
    computes_bfloat16 = False
    cache_alignment = 1
    description = "torch reference kernels"

    @override
    def activate(self) -> AbstractContextManager[None]:
        return native.disabled()

    @override
    def allocate_cache(
        self, layout: CacheLayout, num_blocks: int, block_size: int, dtype: torch.dtype, prefault: int, slots: int
    ) -> KVCache:
        return HostKVCache(layout, num_blocks, block_size, dtype, slots=slots)

    @override
    def input_builder(self, table: RequestTable, options: EngineOptions) -> InputBuilder:
        return NumpyInputBuilder(table)

    @override
    def attention(
        self, cache: KVCache, table: RequestTable, model: LanguageModel, dtype: torch.dtype, options: EngineOptions
    ) -> AttentionBackend:
        return ReferenceAttention(cache, table)

    @override
    def step_runner(
        self,
        model: LanguageModel,
        inputs: InputBuilder,
        attention: AttentionBackend,
        states: StateCaches | None = None,
    ) -> StepRunner:
        return EagerSteps(model)
