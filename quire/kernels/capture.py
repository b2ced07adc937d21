"""Kernel calls that are recorded once and then repeated in one go, without Python between them."""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels import native

_ALIGNMENT = 64  # bytes
_READS = ("aten::resolve_conj", "aten::resolve_neg")  # all that is seen of `tolist`
_local = threading.local()


class RowKind(IntEnum):
    """What the rows of a kernel call are."""

    TOKENS = 0
    LOGITS = 1


def set_row_kind(kind: RowKind) -> None:
    """Set the kind of the calls captured from now on."""


class CapturedCalls:
    """The calls of the compiled kernels that a function makes.

    They are repeated with the same addresses, so the function's inputs must stay where they are and change only in
    their contents, and in how many there are: each call is for as many rows as the step has of something, tokens or
    last tokens of sequences. What the kernels write meanwhile lies in a `Workspace`; it is overwritten by the
    workspace's other recordings.
    """

    def __init__(self, function: Callable[[], object], workspace: Workspace, counts: Sequence[int]) -> None:
        """Run a function and record it.

        Args:
            counts: how many rows there are this time, of each kind; two kinds that are equal count as the first.

        Attributes:
            complete: whether the kernels, for that many rows, were all that it did; only then may it be replayed.
        """
        watch = _Watch()
        native.kernels.begin_capture(list(counts))
        _local.workspace = workspace
        try:
            with watch:
                function()
        finally:
            _local.workspace = None
            self._calls: Any = native.kernels.end_capture()
        self._workspace = workspace  # its memory is what the calls write to
        self.complete = watch.complete and self._calls is not None

    def replay(self, counts: Sequence[int]) -> None:
        """Call the kernels again, for other numbers of rows; what they write lies where it lay."""
        native.kernels.replay(self._calls, list(counts))


class Workspace:
    """Memory for what kernels write. A tensor's memory goes to later ones once nobody has it any more."""

    def __init__(self, most_rows: int = 0) -> None:
        """`most_rows`: behind each tensor there is memory for so many rows of it."""
        self._most_rows = most_rows
        self._free: dict[int, list[np.ndarray[Any, Any]]] = defaultdict(list)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `torch.empty`."""
        most = max(shape[0], self._most_rows) * math.prod(shape[1:]) * dtype.itemsize
        size = max(_ALIGNMENT, 1 << (most - 1).bit_length())
        free = self._free[size]
        memory = free.pop() if free else _aligned(size)
        view = memory.data  # an object of its own, which goes with the last tensor that looks through it
        weakref.finalize(view, free.append, memory).atexit = False
        return torch.frombuffer(view, dtype=dtype, count=math.prod(shape)).view(*shape)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for what a kernel writes, wherever that is to lie."""
    workspace: Workspace | None = getattr(_local, "workspace", None)
    return torch.empty(shape, dtype=dtype) if workspace is None else workspace.empty(shape, dtype)


class _Watch(TorchDispatchMode):
    """Notices when torch computes something, rather than look at tensors in another way."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.complete = True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # What is a view by its kind may have copied all the same (`to`, `contiguous`), or be read out (`tolist`).
        self.complete &= func.is_view and func.name() not in _READS and _memory(out) <= _memory((args, kwargs))
        return out


def _memory(value: Any) -> set[int]:
    """Where the tensors in a value lie."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr()}
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return {address for part in parts for address in _memory(part)}


def _aligned(size: int) -> np.ndarray[Any, Any]:
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size]
