"""The compiled kernels of ``csrc``, if this installation has them; the torch references stand in where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch  # before the kernels: they ask torch's OpenMP how many threads they may use
from torch import Tensor

try:
    from quire.kernels import _native
except ImportError:  # built without a compiler
    _native = None  # type: ignore[assignment]

CODES = {torch.float32: 0, torch.bfloat16: 1}
LANES = 16  # numbers that most kernels take at a time
PAIR = 32  # and attention
MAX_DIM = 1024  # of a head

kernels = _native
_enabled = kernels is not None


def instructions() -> str | None:
    """The instruction set that the kernels use; none if the torch references run."""
    return kernels.INSTRUCTIONS if _enabled else None


def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 numbers, and the kernels use it."""
    return instructions() == "avx512bf16"


def supports(*tensors: Tensor) -> bool:
    """Whether the kernels can work on tensors: of one known type, on the CPU, their last dimension without gaps."""
    dtype = tensors[0].dtype
    if not _enabled or dtype not in CODES:
        return False
    for x in tensors:  # noqa: SIM110 a generator takes longer than all else here
        if x.dtype is not dtype or not x.is_cpu or x.stride(-1) != 1:
            return False
    return True


@contextmanager
def disabled() -> Iterator[None]:
    """The torch references, for comparison."""
    global _enabled  # noqa: PLW0603 one switch for all kernels
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before
