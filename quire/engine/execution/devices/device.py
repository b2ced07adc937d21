"""The interface of devices. Scheduler, core and layers do not depend on the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from quire.engine.execution.attention.backend import AttentionBackend
from quire.engine.execution.cache import KVCache
from quire.engine.execution.inputs import InputBuilder
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.step_graphs import StepRunner
from quire.engine.models.decoder import CacheShape, LanguageModel
from quire.engine.models.loader import LoadTarget


class Device(LoadTarget, Protocol):
    """A device that runs models.

    Attributes:
        description: text for the log, e.g. the instruction set of the kernels.
        cache_alignment: keys and values are padded to a multiple of this many elements in pages.
    """

    description: str
    cache_alignment: int

    def activate(self) -> AbstractContextManager[None]:
        """Select the device's kernels for the calling thread; around loading and every step."""

    def free_memory(self) -> int:
        """Bytes that KV caches may be allocated from."""

    def allocate_cache(
        self, shapes: Sequence[CacheShape], num_blocks: int, block_size: int, dtype: torch.dtype, prefault: int
    ) -> KVCache:
        """Allocate the pages of all layers; `prefault`: bytes to map ahead of their use, where that applies."""

    def input_builder(self, table: RequestTable) -> InputBuilder:
        """The builder of step inputs."""

    def attention(self, cache: KVCache, table: RequestTable, dtype: torch.dtype) -> AttentionBackend:
        """Attention over `cache`; `dtype` is that of queries, keys and values."""

    def step_runner(self, model: LanguageModel) -> StepRunner:
        """The runner of steps that only need logits of last tokens; it uses step graphs where the device has them."""
