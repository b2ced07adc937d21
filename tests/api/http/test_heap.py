"""The heap is trimmed after large bodies, and only then."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.server import running_server, until

PATH = "/v1/completions"


async def test_large_bodies_are_followed_by_a_trim(tmp_path: Path) -> None:
    trims: list[None] = []
    async with running_server(tmp_path) as server:
        heap = server.state.heap
        heap._trim = lambda: trims.append(None)
        trimming = asyncio.create_task(heap.trim_regularly(0.001))
        for _ in range(3):
            await server.post(PATH, {"prompt": "hi", "max_tokens": 1})
        assert not trims
        await server.post(PATH, {"prompt": "hi", "max_tokens": 1, "user": "x" * (17 << 20)})
        await until(lambda: len(trims) == 1)
        await server.post(PATH, {"prompt": "hi", "max_tokens": 1})
        trimming.cancel()
        assert len(trims) == 1
