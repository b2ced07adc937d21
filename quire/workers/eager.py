"""Coroutines that begin at once, and become tasks only if they have to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any

from typing_extensions import override


def run_eagerly(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[None] | None:
    """Run a coroutine on the running event loop until it waits for something.

    Returns the task that runs what is left of it; None if it has ended.
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    return asyncio.get_running_loop().create_task(_Waiting(coroutine, awaited))


class _Waiting(Coroutine[Any, Any, None]):
    """A coroutine that waits for something, for a task that does not know yet for what.

    A generator around the coroutine would not do: a task that is cancelled before its first step never enters it.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], awaited: Any) -> None:
        self._coroutine = coroutine
        self._awaited = awaited
        self._told = False  # the task knows

    @override
    def send(self, value: Any, /) -> Any:
        if self._told:
            return self._coroutine.send(value)
        self._told = True
        return self._awaited

    @override
    def throw(self, kind: Any, value: Any = None, traceback: Any = None, /) -> Any:
        self._told = True
        return self._coroutine.throw(kind if value is None else value)

    @override
    def close(self) -> None:
        self._coroutine.close()

    @override
    def __await__(self) -> Generator[Any, Any, None]:
        raise TypeError("only a task runs it")
