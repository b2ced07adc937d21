"""Counts what happens in each iteration of the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import TracebackType
from typing import Any, Self


class Iterations:
    """Count notes by iteration, inside of `with`. It keeps the event loop turning."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._now = 0
        self._running = False
        self._notes: Counter[int] = Counter()

    def __enter__(self) -> Self:
        self._running = True
        self._loop.call_soon(self._advance)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._running = False

    def note(self, count: int = 1, *_: Any) -> None:
        """Something happened `count` times in this iteration."""
        self._notes[self._now] += count

    @property
    def total(self) -> int:
        """What has happened in all iterations."""
        return self._notes.total()

    @property
    def most(self) -> int:
        """What has happened in the iteration with the most of it."""
        return max(self._notes.values(), default=0)

    def _advance(self) -> None:
        self._now += 1
        if self._running:
            self._loop.call_soon(self._advance)
