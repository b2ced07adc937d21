"""Prepares media of several kinds for one prompt, within memory that is reserved for all of them at once.

A request that waited for memory while it holds some could wait for others that do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from quire.multimodal.memory import MediaMemory, Reservation


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes of memory that media need.

    Attributes:
        peak: the most that they take at any time.
        result: what is left of it when they are prepared.
        where: the field or content part that needs most, for errors.
    """

    peak: int
    result: int
    where: str


class NeedsMore(Exception):
    """Media have turned out to need more memory than was reserved."""


class Preparation(Protocol):
    """Media of one kind, of which it is known how much memory they need."""

    @property
    def need(self) -> MemoryNeed:
        """The memory that they need, as far as it is known."""

    async def run(self, reservation: Reservation) -> Any:
        """Prepare them. What becomes of them is passed on by the reservation.

        Raises:
            NeedsMore: they need more memory; `renew` finds out how much.
        """

    async def renew(self) -> None:
        """Get ready to run again. No memory is reserved meanwhile."""


async def prepare_together(memory: MediaMemory, preparations: Sequence[Preparation], tenant: str) -> list[Any]:
    """The results of preparations, which run one after the other.

    Args:
        memory: the memory for media.
        preparations: at least one.
        tenant: the tenant that sent the media; tenants take turns.

    Raises:
        PromptError: all need more memory than there is.
        QueueFull: there has been no room for too long, or too many requests wait.
    """
    while True:
        needs = [preparation.need for preparation in preparations]
        largest = max(needs, key=lambda need: need.peak)
        with await memory.reserve(_peak(needs), tenant, largest.where) as reservation, suppress(NeedsMore):
            return [await preparation.run(reservation) for preparation in preparations]
        for preparation in preparations:
            await preparation.renew()


def _peak(needs: Sequence[MemoryNeed]) -> int:
    """The most memory that is taken at any time."""
    peak = held = 0
    for need in needs:
        peak = max(peak, held + need.peak)
        held += need.result
    return peak
