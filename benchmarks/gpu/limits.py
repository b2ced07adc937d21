"""Limits of a GPU, measured: how fast it copies memory and multiplies matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

_BYTES = 4 << 30
_SIZE = 8192
_REPEATS = 10
_CLOCK = 2e9  # cycles per second, about


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """What a GPU reaches.

    Attributes:
        device: name of the GPU.
        copy_gb_per_s: bytes read and written by a copy within its memory.
        bf16_tflops: of a product of large bfloat16 matrices.
        fp32_tflops: of a product of large float32 matrices, without TF32.
    """

    device: str
    copy_gb_per_s: float
    bf16_tflops: float
    fp32_tflops: float

    @classmethod
    def measured(cls) -> GpuLimits:
        """Measure the current CUDA device."""
        limits = cls(torch.cuda.get_device_name(), _copy(), _tflops(torch.bfloat16), _tflops(torch.float32))
        torch.cuda.empty_cache()  # memory that a model needs
        return limits

    @property
    def copy_bytes_per_s(self) -> float:
        """Bytes read and written by a copy, in a second."""
        return self.copy_gb_per_s * 1e9

    def as_dict(self) -> dict[str, Any]:
        """For reports."""
        return asdict(self)


def require_gpu(program: str) -> None:
    """End the program if there is no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit(f"{program} needs a CUDA device, and torch finds none: nothing was measured")


def seconds(call: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Seconds of the device for one call: the mean of several, after three that are not counted."""
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats


def keep_busy(duration: float) -> None:
    """Let the device do nothing useful for about `duration` seconds, so that work is submitted meanwhile."""
    torch.cuda._sleep(int(duration * _CLOCK))


def _copy() -> float:
    source = torch.randn(_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    return _rounded(2 * _BYTES / seconds(lambda: target.copy_(source)) / 1e9)


def _tflops(dtype: torch.dtype) -> float:
    a, b = (torch.randn(_SIZE, _SIZE, device="cuda", dtype=dtype) for _ in range(2))
    return _rounded(2 * _SIZE**3 / seconds(lambda: a @ b) / 1e12)


def _rounded(value: float) -> float:
    """To four digits."""
    return float(f"{value:.4g}")
