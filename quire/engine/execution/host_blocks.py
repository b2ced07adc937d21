"""HostBlocks: host memory with a row for each block, and copies between it and a KV cache beside the steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import torch
from typing_extensions import override

from quire.engine.execution.cache import KVCache, OutOfCacheMemory, lazy_zeros
from quire.engine.execution.pinned import Event, new_event

_SETTING = "lower --kv-offloading-size"


class Copy(NamedTuple):
    """A block of a KV cache, and the row that has or gets its bytes."""

    block: int
    row: int


class BlockCopies(Protocol):
    """Rows of host memory, and copies to and from them.

    Copies are made one after the other. Each begins when the steps have ended that were submitted before it. Steps
    that are submitted after it may run at the same time, so that the caller must let them wait where they write what
    is copied, or what is copied to.
    """

    def save(self, cache: KVCache, copies: Sequence[Copy]) -> Event:
        """Begin to copy blocks to rows; the event is reached when all were copied."""

    def restore(self, cache: KVCache, copies: Sequence[Copy]) -> Event:
        """Begin to copy rows to blocks; the event is reached when all were copied."""

    def hold_steps(self, event: Event) -> None:
        """Let the steps that are submitted from now on begin after some copies. The caller does not wait."""

    def read(self, row: int) -> bytes:
        """Return the bytes of a row, which nothing is being copied to."""

    def fill(self, row: int, content: bytes) -> None:
        """Set the bytes of a row, which nothing is being copied to or from."""

    def close(self) -> None:
        """Free the memory, when all copies have ended."""


class HostBlocks(BlockCopies):
    """Rows in the memory of the host. For a GPU it is pinned, and a stream of its own copies."""

    def __init__(self, rows: int, block_bytes: int, device: torch.device) -> None:
        """Reserve the memory.

        Args:
            rows: their number.
            block_bytes: bytes of each.
            device: has the KV cache.

        Raises:
            OutOfCacheMemory: so much cannot be reserved, or not be pinned.
        """
        self._device = device
        self._memory = lazy_zeros(rows * block_bytes, _SETTING)
        self._rows = self._memory.view(rows, block_bytes)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            _pin(self._memory)
            self._stream = torch.cuda.Stream(device)

    @override
    def save(self, cache: KVCache, copies: Sequence[Copy]) -> Event:
        with self._copying() as event:
            for block, row in copies:
                cache.copy_out(block, self._rows[row])
        return event

    @override
    def restore(self, cache: KVCache, copies: Sequence[Copy]) -> Event:
        with self._copying() as event:
            for block, row in copies:
                cache.copy_in(block, self._rows[row])
        return event

    @override
    def hold_steps(self, event: Event) -> None:
        if self._stream is not None:
            assert isinstance(event, torch.cuda.Event)
            torch.cuda.current_stream(self._device).wait_event(event)

    @override
    def read(self, row: int) -> bytes:
        return self._rows[row].numpy().tobytes()

    @override
    def fill(self, row: int, content: bytes) -> None:
        self._rows[row].numpy()[:] = np.frombuffer(content, np.uint8)

    @override
    def close(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
            self._stream = None
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())

    @contextmanager
    def _copying(self) -> Iterator[Event]:
        """Copy in the background, behind the steps that were submitted; yields the event behind the copies."""
        event = new_event(self._device)
        if self._stream is None:
            yield event
            event.record()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield event
            event.record()


def _pin(memory: torch.Tensor) -> None:
    """Pin memory where it is: torch's own allocator of pinned memory takes a power of two of bytes.

    Raises:
        OutOfCacheMemory: the system does not allow it.
    """
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(status):
        raise OutOfCacheMemory(
            f"{memory.nbytes} bytes of host memory cannot be pinned (CUDA error {status}): {_SETTING}"
        )
