"""The compiled kernels of ``csrc``, if this installation has them; the torch references run where it does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

try:
    from quire.kernels import _native
except ImportError:  # built without a compiler
    _native = None  # type: ignore[assignment]

DTYPES = (torch.float32, torch.bfloat16)
LANES = 16  # elements that most kernels process at a time
ATTENTION_VECTOR_WIDTH = 32  # elements of a head that attention processes at a time
MAX_DIM = 1024  # of a head

kernels = _native


class _ThreadState(threading.local):
    disabled = False


_thread = _ThreadState()


def instructions() -> str | None:
    """The instruction set of the kernels; None if the torch references run."""
    return None if kernels is None or _thread.disabled else kernels.INSTRUCTIONS


def has_bfloat16() -> bool:
    """Whether the kernels run and this CPU has instructions for dot products of bfloat16 elements."""
    return instructions() == "avx512bf16"


def supports(*tensors: Tensor) -> bool:
    """Whether the kernels run and can read the tensors: all float32 or all bfloat16, on the CPU, last stride 1."""
    return kernels is not None and not _thread.disabled and kernels.supports(*tensors)


def set_threads(count: int) -> None:
    """Set how many threads kernels and torch's operators use in calls from this thread.

    torch.set_num_threads, which runs where there are no compiled kernels, also sets this for threads that begin later,
    and for matrix products of all threads.
    """
    set_count = torch.set_num_threads if kernels is None else kernels.set_threads
    torch.get_num_threads()  # or the first operator in this thread would set torch's default
    set_count(count)


@contextmanager
def disabled() -> Iterator[None]:
    """Run the torch references in this thread."""
    before, _thread.disabled = _thread.disabled, True
    try:
        yield
    finally:
        _thread.disabled = before
