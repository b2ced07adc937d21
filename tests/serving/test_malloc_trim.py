"""The heap is trimmed after large bodies, and where nothing runs any more."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from quire.serving import malloc_trim as module
from quire.serving.malloc_trim import MallocTrimmer
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


@pytest.mark.parametrize("ends_by", ["time", "growth"])
async def test_a_long_collection_is_not_repeated_soon(monkeypatch: pytest.MonkeyPatch, ends_by: str) -> None:
    """Full collections are counted while objects come whose number would make Python collect again and again."""
    clock, resident, collections = 0.0, 0, [0]
    kept: list[object] = []
    monkeypatch.setattr(module, "_resident_bytes", lambda: resident)
    monkeypatch.setattr(module, "time", Clocks(lambda: clock))
    heap = MallocTrimmer()

    def count(phase: str, info: dict[str, Any]) -> None:
        nonlocal clock
        if info["generation"] == 2:
            clock += 0.03 if phase == "start" else 0.0  # a collection takes so long
            collections[0] += phase == "stop"

    async def make_objects() -> int:
        before = collections[0]
        for _ in range(20):
            kept.append([[] for _ in range(5000)])
            await asyncio.sleep(0.002)  # the trimmer looks
        return collections[0] - before

    gc.freeze()  # so that few objects are many more
    with heap.rationed_collections():
        gc.callbacks.append(count)
        trimming = asyncio.create_task(heap.trim_regularly(lambda: False, 0.001))
        try:
            gc.collect()
            assert await make_objects() == 0
            if ends_by == "time":
                clock += 31.0
            else:
                resident += 1100 << 20
            assert await make_objects() == 1
        finally:
            trimming.cancel()
            gc.callbacks.remove(count)
            gc.unfreeze()
    assert gc.get_threshold()[2] < 1000


class Clocks:
    """A clock in place of `time`'s."""

    def __init__(self, now: Any) -> None:
        self.thread_time = self.monotonic = now
