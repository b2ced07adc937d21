"""The CPU with torch alone: for installations without compiled kernels, and to compare other devices with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from quire.config.options import EngineOptions
from quire.engine.execution.attention.backend import AttentionBackend
from quire.engine.execution.attention.reference import ReferenceAttention
from quire.engine.execution.cache import KVCache, LayerCache, scale_bytes
from quire.engine.execution.devices.host import HostDevice
from quire.engine.execution.inputs import InputBuilder, NumpyInputBuilder
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.step_graphs import EagerSteps, StepRunner
from quire.engine.models.networks.decoder import CacheShape, LanguageModel
from quire.kernels import native


class TorchKVCache(KVCache):
    """A KV cache in which the keys and the values of each layer are separate tensors."""

    def __init__(self, shapes: Sequence[CacheShape], num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        extra = scale_bytes(dtype)
        layers: list[LayerCache] = []
        for shape in shapes:
            size = (shape.heads, num_blocks, block_size)
            keys = _lazy_zeros((*size, shape.key_elements + extra), dtype)
            value_row = shape.value_elements + extra
            values = keys[..., :value_row] if shape.values_in_keys else _lazy_zeros((*size, value_row), dtype)
            layers.append(LayerCache(keys, values, shape))
        self.layers = layers

    @override
    def ensure_mapped(self, block: int) -> None:
        pass  # the system maps pages at the first write

    @override
    def prefault(self) -> bool:
        return False


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that are not resident until written: numpy's come from calloc, torch's are filled."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


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
        self, shapes: Sequence[CacheShape], num_blocks: int, block_size: int, dtype: torch.dtype, prefault: int
    ) -> KVCache:
        return TorchKVCache(shapes, num_blocks, block_size, dtype)

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
