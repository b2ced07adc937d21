"""The device of GPUs on the CPU: Triton's interpreter runs its kernels, and graphs call what they captured again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from quire.config.options import EngineOptions
from quire.engine.execution.cache import CacheMemory
from quire.engine.execution.cuda_graphs import Graph
from quire.engine.execution.devices.triton import TritonDevice
from quire.engine.execution.waiting import RefuseWaiting
from quire.kernels import gpu, native

# For tests of `InterpretedDevice` itself.
interpreted_only = pytest.mark.skipif(not gpu.is_interpreted(), reason="there is a GPU, and no interpreter")


class FakeGraph:
    """Calls the captured function again. It reads its inputs where they were when it was captured, as CUDA does."""

    def __init__(self, replayed: list[int]) -> None:
        self._replayed = replayed
        self._function: Callable[[], None] | None = None

    def capture(self, function: Callable[[], None]) -> None:
        function()
        with RefuseWaiting():
            function()
        self._function = function

    def replay(self) -> None:
        assert self._function is not None
        self._replayed.append(1)
        self._function()


class InterpretedDevice(TritonDevice):
    """`TritonDevice` on the CPU."""

    name = "interpreted"

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.description = "Triton's interpreter"
        self.replayed: list[int] = []

    @contextmanager
    def _activate(self) -> Iterator[None]:
        with native.disabled(), gpu.interpreted():
            yield

    def cache_memory(
        self, options: EngineOptions, share: int | None, reserved: int, largest_step: Callable[[], None]
    ) -> CacheMemory:
        largest_step()
        return CacheMemory((64 << 20) - reserved, "--gpu-memory-utilization")

    def _graph_factory(self) -> Callable[[], Graph]:
        return lambda: FakeGraph(self.replayed)


def gpu_device() -> TritonDevice:
    """The first CUDA device, or its stand-in on the CPU where there is none."""
    if torch.cuda.is_available():
        return TritonDevice(torch.device("cuda", 0))
    return InterpretedDevice()
