"""Coroutines that begin at once, and become tasks only if they have to wait."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from contextlib import closing
from typing import Any


def run_eagerly(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[None] | None:
    """Run a coroutine on the running event loop until it waits for something.

    Returns the task that runs what is left of it; None if it has ended.
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    return asyncio.get_running_loop().create_task(_go_on(coroutine, awaited))


@types.coroutine
def _go_on(begun: Coroutine[Any, Any, Any], awaited: Any) -> Generator[Any, Any, None]:
    """What is left of a coroutine, which waits for something."""
    with closing(begun):  # if the task is cancelled
        yield awaited
        yield from begun
