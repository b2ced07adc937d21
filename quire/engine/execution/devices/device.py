"""The interface of devices. Scheduler, core and layers do not depend on the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from quire.config.options import EngineOptions
from quire.engine.execution.attention.backend import AttentionBackend
from quire.engine.execution.cache import CacheMemory, KVCache
from quire.engine.execution.cache_layout import CacheLayout
from quire.engine.execution.executor import BackgroundRunner, Executor, ParallelExecutor, Runner
from quire.engine.execution.inputs import InputBuilder
from quire.engine.execution.memory import MemoryShare
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.sampling.pending import TokenSampler
from quire.engine.execution.sampling.sampler import GrammarStates
from quire.engine.execution.states import StateCaches
from quire.engine.execution.step_graphs import StepRunner
from quire.engine.models.loader import LoadTarget
from quire.engine.models.networks.decoder import LanguageModel


class Device(LoadTarget, Protocol):
    """A device that runs models.

    Attributes:
        name: value of ``--device``.
        description: text for the log, e.g. the instruction set of the kernels.
        attention_backends: values of ``--attention-backend``.
        cache_alignment: keys and values are padded to a multiple of this many elements in pages.
        row_alignment: see `CacheShape`.
        has_memory: it has memory of its own, beside that of the host.
        compiles_kernels: its kernels are compiled when they are first called, see `warm_up`.
    """

    name: str
    description: str
    attention_backends: tuple[str, ...]
    cache_alignment: int
    row_alignment: int
    compiles_kernels: bool
    has_memory: bool

    def activate(self) -> AbstractContextManager[None]:
        """Select the device and its kernels for the calling thread; around loading and every step."""

    def cache_memory(
        self, options: EngineOptions, share: MemoryShare | None, reserved: int, largest_step: Callable[[], None]
    ) -> CacheMemory:
        """Measure the memory that the KV cache of an engine may take.

        Args:
            options: which part of the memory engines may take.
            share: what the engine may take, where several share the memory; None: it is the only one.
            reserved: bytes that the engine needs for other state.
            largest_step: runs the model's largest step, without a KV cache.
        """

    def allocate_cache(
        self, layout: CacheLayout, num_blocks: int, block_size: int, dtype: torch.dtype, prefault: int, slots: int
    ) -> KVCache:
        """Allocate the pages of all layers, and slots of states.

        `prefault`: bytes of pages to map ahead of their use, where that applies.
        """

    def input_builder(self, table: RequestTable, options: EngineOptions) -> InputBuilder:
        """The builder of step inputs."""

    def attention_bytes(self, model: LanguageModel, options: EngineOptions, context_len: int) -> int:
        """Bytes of the device's memory that `attention` takes; `context_len`: tokens of the longest sequence."""

    def attention(
        self, cache: KVCache, table: RequestTable, model: LanguageModel, dtype: torch.dtype, options: EngineOptions
    ) -> AttentionBackend:
        """Attention of a model over `cache`; `dtype` is that of queries, keys and values.

        Raises:
            UnavailableLibrary: the backend is a library that cannot be imported.
            UnsupportedModel: it does not compute with `dtype`.
        """

    def step_runner(
        self,
        model: LanguageModel,
        inputs: InputBuilder,
        attention: AttentionBackend,
        states: StateCaches | None = None,
    ) -> StepRunner:
        """The runner of steps that only need logits of last tokens; it uses step graphs where the device has them.

        `states`: those of the model's layers; None: they have none.
        """

    def sampler_bytes(self, rows: int, vocab_size: int) -> int:
        """Bytes of the device's memory that a sampler takes; `rows` of the request table."""

    def sampler(
        self, table: RequestTable, vocab_size: int, grammar_states: GrammarStates, inputs: InputBuilder
    ) -> TokenSampler:
        """The sampler of tokens."""

    def release_memory(self) -> None:
        """Return memory that was freed to the system, so that other processes can use it."""

    def executor(self, runner: BackgroundRunner, cache: KVCache, max_steps_in_flight: int) -> Executor:
        """The executor of a decoder's steps; `max_steps_in_flight` is what its sampler allows."""

    def encoder_executor(self, runner: Runner) -> ParallelExecutor:
        """The executor of an encoder's steps."""
