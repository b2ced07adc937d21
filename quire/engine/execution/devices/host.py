"""What devices have in common whose steps run in the calling thread, with the memory of the host."""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from quire.allocator import return_freed_memory
from quire.config.options import EngineOptions
from quire.engine.execution.cache import CacheMemory, KVCache
from quire.engine.execution.devices.device import Device
from quire.engine.execution.executor import BackgroundExecutor, BackgroundRunner, Executor, ParallelExecutor, Runner
from quire.engine.execution.inputs import InputBuilder
from quire.engine.execution.memory import MemoryShare, free_memory
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.sampling.pending import TokenSampler
from quire.engine.execution.sampling.sampler import GrammarStates, Sampler
from quire.engine.models.networks.decoder import LanguageModel


class HostDevice(Device):
    """A device that computes with the cores and the memory of the host."""

    compiles_kernels = False
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
