"""Kernel calls that are captured once and then replayed as a whole, without Python between them."""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels import native
from quire.kernels.sampling import TokenChoices

_ALIGNMENT = 64  # bytes
_READS = ("aten::resolve_conj", "aten::resolve_neg")  # the only operators that `tolist` calls


class RowKind(IntEnum):
    """The kinds of rows of a kernel call."""

    TOKENS = 0  # all tokens of a step
    LOGITS = 1  # the rows that logits are computed for


def set_row_kind(kind: RowKind) -> None:
    """Set what the rows of the calls are that this thread captures from now on.

    A capture starts with `RowKind.TOKENS`. Does nothing when the thread is not capturing.
    """
    if native.kernels is not None:
        native.kernels.set_row_kind(kind)


def break_capture() -> None:
    """Tell that a function does something else than to call kernels, so that a capture of it is not complete.

    Torch's operators are noticed anyway. Does nothing when the thread is not capturing.
    """
    _local.broken = True


def is_capturing() -> bool:
    """Whether this thread captures its kernel calls."""
    return _local.workspace is not None


class CapturedCalls:
    """The calls of compiled kernels that a function makes.

    They are replayed with the same addresses: the function's inputs must stay where they are, and may change only in
    their contents and in their number of rows. What the kernels write is in a `Workspace`, and is overwritten by
    replays of other captures with the same workspace.

    Attributes:
        complete: whether the function did nothing but call kernels that compute one result per row, each for as many
            rows as its row kind has. Only then can the calls be replayed.
        calls: the calls as the compiled kernels take them.
    """

    def __init__(
        self,
        function: Callable[[], object],
        workspace: Workspace,
        counts: Mapping[RowKind, int] | Sequence[int],
        *,
        runs: bool = True,
    ) -> None:
        """Run a function and capture its kernel calls.

        Args:
            counts: number of rows of each kind in this run, by `RowKind`.
            runs: False: the calls are captured, but not made.
        """
        assert native.kernels is not None
        dispatch = _ComputeDetector()
        native.kernels.begin_capture([counts[kind] for kind in RowKind], int(runs))
        _local.workspace, _local.broken = workspace, False
        try:
            with dispatch:
                function()
        finally:
            _local.workspace = None
            self.calls: Any = native.kernels.end_capture()
        self._workspace = workspace  # owns the memory that the calls write to
        self.complete = dispatch.complete and not _local.broken and self.calls is not None

    def replay(self, counts: Sequence[int]) -> None:
        """Make the calls again, for other numbers of rows of each kind. Results are at the same addresses."""
        native.kernels.replay(self.calls, counts)

    def decode(
        self,
        arrays: Sequence[object],
        rows: Sequence[int],
        starts: Sequence[int],
        logits: Tensor,
        choices: TokenChoices,
        inbox: int | None = None,
    ) -> list[list[int]]:
        """Make the calls of decode steps that follow each other, in which each sequence has one token.

        Args:
            arrays: what `build_inputs` fills for each group of layers; the calls read these arrays.
            rows: rows of the request table.
            starts: the position of each row's token in the first step.
            logits: (rows, vocab) float32, where the calls write them.
            choices: how tokens are chosen; they are added to the request table.
            inbox: a file descriptor: the steps end when something can be read from it.

        Returns:
            The tokens of each row, of at least one step. `NO_TOKEN` ends them, as a token of `choices.ends` does.
        """
        tokens: list[int] = native.kernels.decode_steps(
            calls=self.calls,
            counts=[len(rows)] * len(RowKind),
            arrays=arrays,
            rows=rows,
            starts=starts,
            steps=choices.steps,
            logits=logits,
            ends=choices.ends,
            temperatures=choices.temperatures,
            min_ps=choices.min_ps,
            top_ks=choices.top_ks,
            top_ps=choices.top_ps,
            randoms=choices.randoms,
            inbox=-1 if inbox is None else inbox,
        )
        return [tokens[row :: len(rows)] for row in range(len(rows))]


class Workspace:
    """Memory for what kernels write. The memory of a tensor is reused once nothing refers to the tensor any more."""

    def __init__(self, max_rows: int = 0) -> None:
        """`max_rows`: rows that each tensor has memory for, beyond those of its shape."""
        self._max_rows = max_rows
        self._free: dict[int, list[np.ndarray[Any, Any]]] = defaultdict(list)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor, like `torch.empty`."""
        nbytes = max(shape[0], self._max_rows) * math.prod(shape[1:]) * dtype.itemsize
        size = max(_ALIGNMENT, 1 << (nbytes - 1).bit_length())
        free = self._free[size]
        memory = free.pop() if free else _aligned(size)
        view = memory.data  # a new object, which is released together with the last tensor that shares its memory
        weakref.finalize(view, free.append, memory).atexit = False
        return torch.frombuffer(view, dtype=dtype, count=math.prod(shape)).view(*shape)


class _ThreadState(threading.local):
    workspace: Workspace | None = None
    broken = False  # something else than kernels was called since the last capture began


_local = _ThreadState()


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialized tensor for the output of a kernel: from the workspace while capturing, else from torch."""
    workspace = _local.workspace
    return torch.empty(shape, dtype=dtype) if workspace is None else workspace.empty(shape, dtype)


def split_heads(x: Tensor, heads: int, dim: int) -> Tensor:
    """Return a view (rows, heads, dim) of rows (rows, heads * dim), whose last stride is 1.

    The stride of rows stays, with one row too: a kernel call that is captured with one is replayed with others. Torch's
    `unflatten` and `view` may change it.
    """
    return x.as_strided((len(x), heads, dim), (x.stride(0), dim, 1), x.storage_offset())


class _ComputeDetector(TorchDispatchMode):
    """Notice when torch computes something, rather than make views of tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.complete = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is ever compiled. Otherwise the first call imports torch._dynamo, for a second and 100 MB."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # An operator that is declared as a view may still copy (`to`, `contiguous`) or be read (`tolist`).
        self.complete &= func.is_view and func.name() not in _READS and _storages(out) <= _storages((args, kwargs))
        return out


def _storages(value: Any) -> set[int]:
    """Addresses of the storages of all tensors in a value."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr()}
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return {address for part in parts for address in _storages(part)}


def _aligned(size: int) -> np.ndarray[Any, Any]:
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size]
