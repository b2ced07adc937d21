"""Blocks in host memory: the bytes of a device's blocks, and the order in which a GPU is told to copy them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.engine.execution.cache import DeviceKVCache, HostKVCache, KVCache, OutOfCacheMemory
from quire.engine.execution.cache_layout import CacheLayout
from quire.engine.execution.host_blocks import Copy, HostBlocks
from quire.engine.models.specs.cache import CacheGroup, CacheShape, FullCache

LAYOUT = CacheLayout.of_one_group([CacheShape(2, 16, 16), CacheShape(1, 32, 8)], CacheGroup(FullCache(), (0, 1)))
SIZE = LAYOUT.block_bytes(4, torch.float32)
CPU = torch.device("cpu")


def caches() -> list[KVCache]:
    return [DeviceKVCache(LAYOUT, 5, 4, torch.float32, CPU), HostKVCache(LAYOUT, 5, 4, torch.float32)]


@pytest.mark.parametrize("cache", caches(), ids=["device", "host"])
def test_blocks_come_back_as_they_were(cache: KVCache) -> None:
    rows = HostBlocks(3, SIZE, CPU)
    contents = [bytes(torch.randint(0, 256, (SIZE,), dtype=torch.uint8).tolist()) for _ in range(2)]
    for block, content in zip((1, 4), contents, strict=True):
        cache.write(block, content)
    assert rows.save(cache, [Copy(1, 2), Copy(4, 0)]).query()
    assert [rows.read(2), rows.read(0)] == contents
    rows.fill(1, contents[0])
    rows.restore(cache, [Copy(0, 1), Copy(1, 0)])
    assert [cache.read(block) for block in (0, 1, 4)] == [contents[0], contents[1], contents[1]]
    rows.close()


def test_a_gpu_copies_on_a_stream_of_its_own_behind_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, ...]] = []

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = str(name)

        def wait_stream(self, other: Stream) -> None:
            done.append((self.name, "waits for", other.name))

        def wait_event(self, event: Event) -> None:
            done.append((self.name, "waits for the event", event.recorded_on))

        def synchronize(self) -> None:
            done.append((self.name, "ends"))

    class Event:
        recorded_on = ""

        def record(self) -> None:
            self.recorded_on = active[-1]
            done.append((active[-1], "records"))

    class Cache(DeviceKVCache):
        def copy_out(self, block: int, target: torch.Tensor) -> None:
            done.append((active[-1], "copies out"))

        def copy_in(self, block: int, source: torch.Tensor) -> None:
            done.append((active[-1], "copies in"))

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        active.append(stream.name)
        yield
        active.pop()

    active, status = ["steps"], [0]
    pins = SimpleNamespace(
        cudaHostRegister=lambda *_: status[0], cudaHostUnregister=lambda _: done.append(("unpinned",))
    )
    for name, value in {
        "Stream": lambda _: Stream("copies"),
        "Event": Event,
        "stream": on,
        "current_stream": lambda _: Stream(active[-1]),
        "cudart": lambda: pins,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    gpu = torch.device("cuda")
    cache = Cache(LAYOUT, 5, 4, torch.float32, CPU)
    rows = HostBlocks(3, SIZE, gpu)
    rows.hold_steps(rows.save(cache, [Copy(1, 2), Copy(4, 0)]))
    rows.restore(cache, [Copy(0, 1)])
    rows.close()
    assert done == [
        ("copies", "waits for", "steps"),
        ("copies", "copies out"),
        ("copies", "copies out"),
        ("copies", "records"),
        ("steps", "waits for the event", "copies"),
        ("copies", "waits for", "steps"),
        ("copies", "copies in"),
        ("copies", "records"),
        ("copies", "ends"),
        ("unpinned",),
    ]
    status[0] = 2
    with pytest.raises(OutOfCacheMemory, match=r"cannot be pinned .CUDA error 2.: lower --kv-offloading-size"):
        HostBlocks(3, SIZE, gpu)
