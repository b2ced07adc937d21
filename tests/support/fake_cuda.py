"""Stands in for a CUDA device on the CPU: tensors are those of the CPU, and work is done as soon as it is submitted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode


class FakeEvent:
    """A `torch.cuda.Event` with times of the host."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._timing = enable_timing
        self._at: float | None = None

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self._timing
        assert end._timing
        assert self._at is not None
        assert end._at is not None
        return max(1e-3, (end._at - self._at) * 1e3)


class FakeCudaGraph:
    """A `torch.cuda.CUDAGraph` without work."""

    def replay(self) -> None:
        """Do nothing."""


class _OnCpu(TorchFunctionMode):
    """Operators that are asked for a CUDA device use the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        arguments = {name: _moved(value) for name, value in (kwargs or {}).items()}
        return func(*(_moved(value) for value in args), **arguments)


def _moved(value: Any) -> Any:
    is_cuda = value == "cuda" if isinstance(value, str) else isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("cpu") if is_cuda else value


@contextmanager
def fake_cuda(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch's functions of the benchmarks work without a GPU; `torch.cuda.is_available` remains false."""
    nothing: dict[str, Callable[..., None]] = {
        name: lambda *_, **__: None for name in ("synchronize", "empty_cache", "_sleep")
    }
    for name, function in nothing.items():
        patch.setattr(torch.cuda, name, function)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "get_device_name", lambda *_: "no GPU")
    patch.setattr(torch.cuda, "Event", FakeEvent)
    patch.setattr(torch.cuda, "CUDAGraph", FakeCudaGraph)
    patch.setattr(torch.cuda, "graph", lambda _: nullcontext())
    with _OnCpu():
        yield
