"""Runs several works of one request at once, within a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

Result = TypeVar("Result")


async def gather_limited(limit: int, works: Sequence[Callable[[], Awaitable[Result]]]) -> list[Result]:
    """The results of works, in their order. If one fails, the others are cancelled.

    Args:
        limit: how many of them run at once.
        works: functions that begin them.
    """
    slots = asyncio.Semaphore(limit)

    async def run(work: Callable[[], Awaitable[Result]]) -> Result:
        async with slots:
            return await work()

    tasks = [asyncio.create_task(run(work)) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
