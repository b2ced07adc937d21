"""StateCaches: which slot has the states of each sequence in the batch, and a step's view of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from quire.engine.execution.cache import lazy_zeros
from quire.engine.execution.inputs import Span
from quire.engine.execution.pinned import to_device
from quire.engine.execution.state_slots import StateSlots
from quire.engine.models.layers.inputs import StepStates

_NO_SLOT = -1  # of padding, whose states are not kept


@dataclass(frozen=True, slots=True)
class _Draft:
    """A draft that is being verified.

    Attributes:
        slot: has the states behind all of its tokens; that of the row has those before the step.
        count: its tokens.
    """

    slot: int
    count: int


class StateCaches:
    """Assign slots to the rows of the request table.

    A row keeps its slot. A step with a draft changes the states in a spare slot instead, which becomes the row's if the
    whole draft is accepted. Else the row goes on with the states from before the step.
    """

    def __init__(self, slots: StateSlots, rows: int, snapshots: int = 0) -> None:
        """Make them.

        Args:
            slots: the memory of states.
            rows: of the request table; the other slots are spare.
            snapshots: the most states that are saved in the host's memory.

        Raises:
            OutOfCacheMemory: there is not enough for snapshots.
        """
        self.slots = slots
        self._saved = lazy_zeros(snapshots * slots.memory.shape[1], "lower --state-snapshot-memory")
        self._saved = self._saved.view(snapshots, slots.memory.shape[1])
        self._slot_of = np.arange(rows, dtype=np.int64)  # by row
        self._spare = list(range(rows, len(slots)))
        self._drafts: dict[int, _Draft] = {}  # by row
        # At the same addresses in each step, so that its kernel calls can be replayed.
        self._of_step = np.zeros(rows, np.int64)
        self._cu_seqlens = np.zeros(rows + 1, np.int64)
        device = slots.memory.device
        self._padded_slots = torch.full((rows,), _NO_SLOT, device=device)
        self._padded_cu_seqlens = torch.arange(rows + 1, device=device)

    def of_step(self, spans: Sequence[Span], padded: int | None = None) -> SlotStates:
        """Return the states of the sequences of a step. Those of sequences that begin are zero.

        `padded`: see `StepInputs`.
        """
        memory, slots = self.slots.memory, self._slot_of[np.array([span.row for span in spans], np.int64)]
        for index, span in enumerate(spans):
            if span.draft:
                self._settle(span.row, accepted=False)  # of a step that failed
                draft = self._drafts[span.row] = _Draft(self._spare.pop(), len(span.draft))
                memory[draft.slot].copy_(memory[slots[index]])
                slots[index] = draft.slot
            elif not span.start:
                memory[slots[index]].zero_()
        if padded is not None:
            return self._of_padded_step(spans, slots, padded)
        self._of_step[: len(slots)] = slots
        self._cu_seqlens[1 : len(slots) + 1] = [span.offset + span.count for span in spans]
        of_step = torch.from_numpy(self._of_step[: len(slots)])
        if memory.device.type != "cpu":
            of_step = of_step.to(memory.device)
        return SlotStates(self.slots, of_step, torch.from_numpy(self._cu_seqlens[: len(slots) + 1]), spans)

    def _of_padded_step(self, spans: Sequence[Span], slots: NDArray[np.int64], padded: int) -> SlotStates:
        values = np.full(padded, _NO_SLOT, np.int64)
        values[: len(slots)] = slots
        of_step = self._padded_slots[:padded]
        of_step.copy_(to_device(values, of_step.device))
        return SlotStates(self.slots, of_step, self._padded_cu_seqlens[: padded + 1], spans)

    def verified(self, row: int, accepted: int) -> None:
        """Keep the states behind a draft, if all of its tokens were accepted, and those before the step otherwise."""
        draft = self._drafts.get(row)
        if draft is not None:
            self._settle(row, accepted=accepted == draft.count)

    def _settle(self, row: int, *, accepted: bool) -> None:
        draft = self._drafts.pop(row, None)
        if draft is None:
            return
        if accepted:
            self._spare.append(int(self._slot_of[row]))
            self._slot_of[row] = draft.slot
        else:
            self._spare.append(draft.slot)

    def copy_out(self, row: int, place: int) -> None:
        """Save the states of a row, of all layers, in a place for snapshots."""
        self._saved[place].copy_(self.slots.memory[self._slot_of[row]])

    def copy_in(self, row: int, place: int) -> None:
        """Let a row have the states that were saved in a place."""
        self.slots.memory[self._slot_of[row]].copy_(self._saved[place])

    def removed(self, rows: Sequence[int]) -> None:
        """Note that sequences have left the batch."""
        for row in rows:
            self._settle(row, accepted=False)

    def check(self) -> None:
        """Assert that each slot is that of one row, of one draft, or spare."""
        drafts = [draft.slot for draft in self._drafts.values()]
        assert sorted([*self._slot_of.tolist(), *self._spare, *drafts]) == [*range(len(self.slots))], "slots got lost"


class SlotStates(StepStates):
    """The states of a step, in their slots."""

    def __init__(self, pool: StateSlots, slots: Tensor, cu_seqlens: Tensor, spans: Sequence[Span]) -> None:
        """`slots`: (sequences,) int64; `cu_seqlens`: see `StepStates`."""
        self.ranges = [(span.offset, span.offset + span.count) for span in spans]
        self.slots = slots
        self.cu_seqlens = cu_seqlens
        self._pool = pool
        self._written: dict[int, Sequence[Tensor]] = {}

    @override
    def arrays(self, layer: int) -> list[Tensor]:
        return self._pool.arrays[layer]

    @override
    def read(self, layer: int) -> list[Tensor]:
        slots = self.slots.tolist()
        return [torch.stack([array[slot] for slot in slots]) for array in self._pool.arrays[layer]]

    @override
    def write(self, layer: int, arrays: Sequence[Tensor]) -> None:
        self._written[layer] = arrays

    def commit(self) -> None:
        """Store what was written."""
        slots = self.slots.tolist()
        for layer, written in self._written.items():
            for array, values in zip(self._pool.arrays[layer], written, strict=True):
                for slot, state in zip(slots, values, strict=True):  # indexing a CPU's memory copies byte by byte
                    array[slot].copy_(state)
