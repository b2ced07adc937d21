"""Work on long lists in slices."""

from __future__ import annotations

import asyncio

from quire.api.responses.service import map_in_slices


async def test_others_run_between_the_slices() -> None:
    ticks = 0

    async def count() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    counting = asyncio.create_task(count())
    pairs = await map_in_slices(range(3000), lambda part: [(number, ticks) for number in part])
    counting.cancel()
    assert [number for number, _ in pairs] == list(range(3000))
    assert len({tick for _, tick in pairs}) > 10  # there are twelve slices of 256
    assert await map_in_slices([], list) == []
