"""StateSlots: the memory of states of a fixed size, in slots of which each has those of one sequence."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.engine.models.specs.cache import StateArray, StateCache

_ALIGNMENT = 64  # bytes: of vectors that kernels load, and of cache lines


class StateSlots:
    """The states of all layers. Those of a sequence are adjacent: they are zeroed and copied as a whole.

    Attributes:
        memory: (slots, bytes) uint8.
        arrays: of each layer with a state, by its index, each array (slots, *shape). It is contiguous within a slot.
    """

    def __init__(self, memory: Tensor, kinds: Mapping[int, StateCache]) -> None:
        """`memory`: (slots, `slot_bytes(kinds)`) uint8; `kinds`: the states of layers."""
        self.memory = memory
        self.arrays: dict[int, list[Tensor]] = {}
        begin = 0
        for layer, kind in kinds.items():
            self.arrays[layer] = []
            for array in kind.arrays:
                part = memory[:, begin : begin + array.nbytes]
                self.arrays[layer].append(part.view(getattr(torch, array.dtype)).unflatten(1, array.shape))
                begin += _aligned_bytes(array)

    def __len__(self) -> int:
        return len(self.memory)


def slot_bytes(kinds: Mapping[int, StateCache]) -> int:
    """Return the bytes of the states of one sequence. `kinds`: the states of layers."""
    return sum(_aligned_bytes(array) for kind in kinds.values() for array in kind.arrays)


def _aligned_bytes(array: StateArray) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
