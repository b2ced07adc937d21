"""Host memory from which a device copies in the background, and events of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_COUNT = 4  # buffers: one is filled while the device copies from the others


class Event(Protocol):
    """A point in the work of a device."""

    def record(self) -> None:
        """Set the point behind all work that was submitted."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def synchronize(self) -> None:
        """Wait until the device has reached it."""


class HostEvent(Event):
    """The event of a device that has done all work as soon as it was submitted."""

    def record(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Do nothing."""


def new_event(device: torch.device) -> Event:
    """An event of a device that was not recorded; it counts as reached until then."""
    return cast("Event", torch.cuda.Event()) if device.type == "cuda" else HostEvent()


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory that `device` reads and writes in the background: pinned, if it is a GPU."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of an array, which the device makes in the background."""
    source = pinned_empty(array.shape, torch.from_numpy(array).dtype, device)
    source.numpy()[...] = array
    return source.to(device, non_blocking=True)


class PinnedBuffers:
    """Buffers that are filled in turn; one is filled again when the device has copied what it held."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor] = [pinned_empty((0,), torch.uint8, device) for _ in range(_COUNT)]
        self._copied = [new_event(device) for _ in range(_COUNT)]
        self._index = 0

    @contextmanager
    def next(self, nbytes: int) -> Iterator[tuple[NDArray[np.uint8], Callable[[Tensor | None], Tensor]]]:
        """A buffer of `nbytes`, and a function that copies it to a tensor of the device, or to a new one for None."""
        index = self._index = (self._index + 1) % _COUNT
        self._copied[index].synchronize()
        if len(self._buffers[index]) < nbytes:
            self._buffers[index] = pinned_empty((1 << (nbytes - 1).bit_length(),), torch.uint8, self._device)
        source = self._buffers[index][:nbytes]

        def copy(target: Tensor | None) -> Tensor:
            if target is None:
                target = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            target.copy_(source, non_blocking=True)
            self._copied[index].record()
            return target

        memory: NDArray[Any] = source.numpy()
        yield memory, copy
