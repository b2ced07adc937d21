"""Work on long lists in slices, between which the event loop serves others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from quire.workers.tenant import take_turn

T = TypeVar("T")
R = TypeVar("R")
_SLICE = 256  # items: a few milliseconds of work


async def map_in_slices(items: Sequence[T], work: Callable[[Sequence[T]], Iterable[R]]) -> list[R]:
    """The results of `work` for slices of the items, in one list. A short list is done at once."""
    results: list[R] = []
    for start in range(0, len(items), _SLICE):
        if len(items) > _SLICE:
            await take_turn()
        results.extend(work(items[start : start + _SLICE]))
    return results
