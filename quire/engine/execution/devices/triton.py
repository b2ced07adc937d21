"""A GPU with Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import torch
from typing_extensions import override

from quire.allocator import return_freed_memory
from quire.config.options import EngineOptions
from quire.engine.execution.attention.backend import AttentionBackend
from quire.engine.execution.attention.chunked import check_for_libraries
from quire.engine.execution.attention.flash_attn import FlashAttention
from quire.engine.execution.attention.flashinfer import (
    AttentionKind,
    FlashInferAttention,
    attention_kinds,
    flashinfer_bytes,
)
from quire.engine.execution.attention.libraries import LIBRARIES
from quire.engine.execution.attention.triton import TritonAttention
from quire.engine.execution.cache import CacheMemory, DeviceKVCache, KVCache
from quire.engine.execution.cache_layout import CacheLayout
from quire.engine.execution.cuda_graphs import CudaGraph, Graph, GraphSteps, capture_sizes
from quire.engine.execution.device_inputs import DeviceInputBuilder
from quire.engine.execution.devices.device import Device
from quire.engine.execution.executor import BackgroundExecutor, BackgroundRunner, Executor, ParallelExecutor, Runner
from quire.engine.execution.gpu_memory import gpu_cache_memory, measure_largest_step
from quire.engine.execution.inputs import InputBuilder
from quire.engine.execution.memory import MemoryShare
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.sampling.device_sampler import DeviceSampler
from quire.engine.execution.sampling.device_settings import settings_bytes
from quire.engine.execution.sampling.pending import TokenSampler
from quire.engine.execution.sampling.sampler import GrammarStates
from quire.engine.execution.states import StateCaches
from quire.engine.execution.step_graphs import EagerSteps, StepRunner
from quire.engine.models.networks.decoder import Decoder, LanguageModel
from quire.engine.models.specs.cache import IndexedCache
from quire.engine.models.specs.decoder import DecoderSpec
from quire.kernels.selected_attention import SELECTION_BYTES

_UTILIZATION = 0.9  # vLLM's default
_SETTING = "--gpu-memory-utilization"
_SHARED_SETTING = f"{_SETTING}, which all models share, or set --kv-cache-memory-bytes for each KV cache"


class TritonDevice(Device):
    """A CUDA device."""

    name = "cuda"
    attention_backends = ("auto", "triton", *LIBRARIES)
    quantizable_dtypes = frozenset((torch.float32, torch.float16, torch.bfloat16))
    computes_bfloat16 = True
    computes_float16 = True
    cache_alignment = 1
    row_alignment = 16  # bytes that a thread loads at a time
    compiles_kernels = True
    has_memory = True

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.description = f"Triton kernels on {torch.cuda.get_device_name(torch_device)}"

    @override
    def activate(self) -> AbstractContextManager[None]:
        return self._activate()

    @contextmanager
    def _activate(self) -> Iterator[None]:
        with torch.cuda.device(self.torch_device):
            yield

    @override
    def cache_memory(
        self, options: EngineOptions, share: MemoryShare | None, reserved: int, largest_step: Callable[[], None]
    ) -> CacheMemory:
        before, after = measure_largest_step(self.torch_device, largest_step)
        nbytes = gpu_cache_memory(before, after, options.gpu_memory_utilization or _UTILIZATION, share)
        setting = _SETTING if share is None else _SHARED_SETTING
        return CacheMemory(nbytes - reserved, setting, after.peak - before.allocated)

    @override
    def allocate_cache(
        self, layout: CacheLayout, num_blocks: int, block_size: int, dtype: torch.dtype, prefault: int, slots: int
    ) -> KVCache:
        return DeviceKVCache(layout, num_blocks, block_size, dtype, self.torch_device, slots)

    @override
    def input_builder(self, table: RequestTable, options: EngineOptions) -> InputBuilder:
        sizes = () if options.enforce_eager else capture_sizes(options)
        return DeviceInputBuilder(table, self.torch_device, sizes)

    @override
    def attention_bytes(self, model: LanguageModel, options: EngineOptions, context_len: int) -> int:
        if options.attention_backend != "flashinfer":
            selects = any(isinstance(group.kind, IndexedCache) for group in model.cache_groups(context_len))
            return SELECTION_BYTES if selects else 0
        kinds, blocks = _attention_kinds(model), -(-context_len // options.block_size)
        return flashinfer_bytes(len(kinds), options.max_num_seqs, blocks)

    @override
    def attention(
        self, cache: KVCache, table: RequestTable, model: LanguageModel, dtype: torch.dtype, options: EngineOptions
    ) -> AttentionBackend:
        if options.attention_backend in LIBRARIES:
            check_for_libraries(cache.layout, options.attention_backend)
        match options.attention_backend:
            case "flash_attn":
                return FlashAttention(cache, dtype)
            case "flashinfer":
                return FlashInferAttention(cache, table, dtype, _attention_kinds(model), self.torch_device)
        return TritonAttention(cache, table.block_size)

    @override
    def step_runner(
        self,
        model: LanguageModel,
        inputs: InputBuilder,
        attention: AttentionBackend,
        states: StateCaches | None = None,
    ) -> StepRunner:
        assert isinstance(inputs, DeviceInputBuilder)
        if not inputs.padded_sizes:
            return EagerSteps(model)
        steps = GraphSteps(model, inputs, attention, self._graph_factory(), states)
        steps.capture()
        return steps

    @override
    def sampler_bytes(self, rows: int, vocab_size: int) -> int:
        return settings_bytes(rows, vocab_size)

    @override
    def sampler(
        self, table: RequestTable, vocab_size: int, grammar_states: GrammarStates, inputs: InputBuilder
    ) -> TokenSampler:
        assert isinstance(inputs, DeviceInputBuilder)
        return DeviceSampler(table, vocab_size, self.torch_device, inputs.last_tokens, grammar_states)

    @override
    def release_memory(self) -> None:
        return_freed_memory()
        if self.torch_device.type == "cuda":  # not where an interpreter runs the kernels
            torch.cuda.empty_cache()

    @override
    def executor(self, runner: BackgroundRunner, cache: KVCache, max_steps_in_flight: int) -> Executor:
        return BackgroundExecutor(self.activate, runner, max_steps_in_flight, cache)

    @override
    def encoder_executor(self, runner: Runner) -> ParallelExecutor:
        return ParallelExecutor(self.activate, runner, cores=1)  # its steps run one after the other on the device

    def _graph_factory(self) -> Callable[[], Graph]:
        return CudaGraph.sharing_memory()


def _attention_kinds(model: LanguageModel) -> list[AttentionKind]:
    return attention_kinds(cast("DecoderSpec", cast("Decoder", model).spec))
