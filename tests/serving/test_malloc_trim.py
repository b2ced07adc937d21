"""The heap is trimmed after large bodies, and where nothing runs any more."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.serving import malloc_trim as module
from quire.serving.malloc_trim import MallocTrimmer
from tests.support.fake_core import FakeCore
from tests.support.server import running_server, until

PATH = "/v1/completions"


async def test_the_heap_is_trimmed_at_the_start_and_when_no_request_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
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
    await until(lambda: looked > 3)
    sizes["resident"] += 100 << 20
    await until(lambda: looked > 6)
    assert trims == [1 << 30]
    idle = True
    await until(lambda: looked > 13)
    trimming.cancel()
    assert trims == [1 << 30, sizes["resident"]]


async def test_large_bodies_are_followed_by_a_trim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[None] = []
    async with running_server(tmp_path) as server:
        heap = server.state.malloc_trimmer
        monkeypatch.setattr(module, "return_freed_memory", lambda: trims.append(None))
        trimming = asyncio.create_task(heap.trim_regularly(lambda: False, 0.001))
        await until(lambda: len(trims) == 1)
        for _ in range(3):
            await server.post(PATH, {"prompt": "hi", "max_tokens": 1})
        assert len(trims) == 1
        await server.post(PATH, {"prompt": "hi", "max_tokens": 1, "user": "x" * (17 << 20)})
        await until(lambda: len(trims) == 2)
        await server.post(PATH, {"prompt": "hi", "max_tokens": 1})
        trimming.cancel()
        assert len(trims) == 2


class Collections:
    """A trimmer that looks again and again, and the full collections that it makes, which take as long as they should.

    Attributes:
        resident: bytes of the process.
        seconds: of a collection, for each object.
        count: full collections.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.resident, self.seconds, self.count = 0, 1e-7, 0
        self._clock = 0.0
        self._objects: list[object] = []
        self._looks = 0
        monkeypatch.setattr(module, "_resident_bytes", lambda: self.resident)
        monkeypatch.setattr(module, "time", SimpleNamespace(thread_time=lambda: self._clock))

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        heap = MallocTrimmer()
        gc.collect()
        gc.freeze()  # as the server does before it listens
        gc.callbacks.append(self._watch)
        try:
            with heap.rationed_collections():
                trimming = asyncio.create_task(heap.trim_regularly(self._look, 0.001))
                yield
                trimming.cancel()
        finally:
            gc.callbacks.remove(self._watch)
            gc.unfreeze()

    async def made_by(self, objects: int) -> int:
        """Full collections while so many objects are made, which stay, and after them."""
        before = self.count
        while objects > 0:
            self._objects.append([[] for _ in range(10_000)])  # more than ten collections of younger objects
            objects -= 10_000
        looks = self._looks
        await until(lambda: self._looks > looks + 3)
        return self.count - before

    def drop(self) -> None:
        """Free all of these objects."""
        self._objects.clear()

    def _look(self) -> bool:
        self._looks += 1
        return False

    def _watch(self, phase: str, info: dict[str, Any]) -> None:
        if info["generation"] == 2 and phase == "stop":
            self.count += 1
            self._clock += self.seconds * max(100_000, sum(map(len, self._objects)))  # type: ignore[arg-type]


async def test_few_objects_are_searched_for_garbage_regularly(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Collections(monkeypatch)
    async with made.watched():
        for _ in range(3):
            assert await made.made_by(100_000) == 1
            made.drop()
    assert gc.get_threshold()[2] < 1000


async def test_many_objects_are_searched_when_they_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would search them again and again while they become more."""
    made = Collections(monkeypatch)
    async with made.watched():
        assert await made.made_by(1_000_000) == 0
        assert await made.made_by(1_000_000) == 0
        made.drop()
        assert await made.made_by(10_000) == 1


async def test_many_objects_are_searched_once_memory_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Collections(monkeypatch)
    async with made.watched():
        assert await made.made_by(500_000) == 0
        made.resident += 1100 << 20
        assert await made.made_by(10_000) == 1
        assert await made.made_by(500_000) == 0


async def test_how_long_a_collection_takes_is_known_from_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Collections(monkeypatch)
    async with made.watched():
        made.seconds = 1e-6  # a slow machine: 100 ms
        assert await made.made_by(100_000) == 1
        made.drop()
        assert await made.made_by(100_000) == 0


def post(content: bytes, length: int | None = None) -> bytes:
    """A request, which announces `length` bytes if given."""
    size = len(content) if length is None else length
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        PATH.encode(),
        size,
        content,
    )


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (post(b'{"prompt": "hi", "max_tokens": 1}'), 200),
        (post(b'{"prompt": "hi", "max_tokens": 1, "stream": true}'), 200),
        (post(b'{"prompt": "hi", "max_tokens": -1}'), 400),
        (post(b'{"prompt": "hi"'), 400),
        (post(b'{"prompt": "hi", "user": %s}' % (b"[" * 300 + b"]" * 300)), 400),
        (post(b'{"prompt": "hi", "max_tokens": 20}'), None),
        (post(b'{"prompt": "hi", "max_tokens": 20, "stream": true}'), None),
        (post(b'{"prompt": "hi"', length=99), None),
    ],
    ids=["answer", "stream", "invalid", "broken", "deep", "left", "left stream", "left body"],
)
async def test_requests_leave_no_garbage(tmp_path: Path, request_bytes: bytes, status: int | None) -> None:
    """Only a full collection would find it, which takes the longer the more clients there are."""
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        port = int(server.url.rpartition(":")[2])
        gc.collect()
        gc.freeze()  # what there was before the request need not be searched again
        gc.disable()
        try:
            if status is None:
                core.hold.set()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_bytes)
            if status is None:
                await until(lambda: server.state.in_flight)
            else:
                assert int((await reader.readline()).split()[1]) == status
            writer.close()
            await until(lambda: not server.state.in_flight and not len(server.connections))
            core.hold.clear()
            await server.post(PATH, {"prompt": "hi", "max_tokens": 1})  # the tasks of the other one have ended
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            kinds = (RequestResponseCycle, HttpToolsProtocol, Request, BaseException)
            assert [item for item in gc.garbage if isinstance(item, kinds)] == []
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.unfreeze()
            gc.enable()
