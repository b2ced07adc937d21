"""The heap is trimmed after large bodies, and where nothing runs any more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quire.api.http import malloc_trim as module
from quire.api.http.malloc_trim import MallocTrimmer
from tests.support.server import running_server, until

PATH = "/v1/completions"


async def test_the_heap_is_trimmed_once_when_no_request_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"resident": 1 << 30}
    monkeypatch.setattr(module, "_resident_bytes", lambda: sizes["resident"])
    trims: list[int] = []
    heap, idle, looked = MallocTrimmer(), False, 0

    def is_idle() -> bool:
        nonlocal looked
        looked += 1
        return idle

    monkeypatch.setattr(module, "return_freed_memory", lambda: trims.append(sizes["resident"]))
    trimming = asyncio.create_task(heap.trim_regularly(is_idle, 0.001))
    sizes["resident"] += 100 << 20
    await until(lambda: looked > 3)
    assert not trims
    idle = True
    await until(lambda: looked > 10)
    trimming.cancel()
    assert trims == [sizes["resident"]]


async def test_large_bodies_are_followed_by_a_trim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[None] = []
    async with running_server(tmp_path) as server:
        heap = server.state.malloc_trimmer
        monkeypatch.setattr(module, "return_freed_memory", lambda: trims.append(None))
        trimming = asyncio.create_task(heap.trim_regularly(lambda: False, 0.001))
        for _ in range(3):
            await server.post(PATH, {"prompt": "hi", "max_tokens": 1})
        assert not trims
        await server.post(PATH, {"prompt": "hi", "max_tokens": 1, "user": "x" * (17 << 20)})
        await until(lambda: len(trims) == 1)
        await server.post(PATH, {"prompt": "hi", "max_tokens": 1})
        trimming.cancel()
        assert len(trims) == 1
