"""Preparation of pictures: items, the cache, memory, limits, cancellation."""

from __future__ import annotations

import asyncio
import gc
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.config.options import PictureOptions
from quire.engine.client.pictures import FixedSize, GridTiles, PatchRows, PictureInfo
from quire.multimodal.errors import PromptError
from quire.multimodal.memory import MediaMemory
from quire.multimodal.picture_jobs import PictureFile
from quire.multimodal.picture_reader import PictureReader, RequestPicture
from quire.multimodal.pictures.cache import RequestCache
from quire.multimodal.pictures.decode import PictureError
from quire.multimodal.pictures.pixels import picture_pixels
from tests.support.pictures import drawn, encoded, prepared

SMALL = PictureInfo(
    placeholder=1, placeholder_text="<image>", geometry=FixedSize(height=28, width=28, tokens=4, resample="bilinear")
)
TILES = PictureInfo(
    placeholder=1, placeholder_text="<image>", geometry=GridTiles(height=28, width=28, tokens=4, max_tiles=6)
)
RED, PLAIN = drawn(60, 40, seed=1), drawn(31, 90, seed=2)


class _Reader:
    """A reader, with what it has told its observer."""

    def __init__(self, memory: MediaMemory, **options: Any) -> None:
        self.memory = memory
        self.lookups: list[bool] = []
        self.reader = PictureReader(PictureOptions(**options), memory, max_size=1 << 20, on_lookup=self.lookups.append)

    async def prepare(self, *files: bytes | None, info: PictureInfo = SMALL, **options: Any) -> list[RequestPicture]:
        """Prepare files, which all have the name and the cache of the options."""
        fields = {name: options.pop(name, None) for name in ("name", "request_cache")}
        parts = [
            PictureFile(
                None if content is None else io.BytesIO(content), f"messages[0].content[{index}]", info, **fields
            )
            for index, content in enumerate(files)
        ]
        return await prepared(self.reader, parts, **{"max_tokens": 100, "sequences": 1, **options})


@asynccontextmanager
async def _reader(memory: int = 1 << 30, **options: Any) -> AsyncIterator[_Reader]:
    prepared = _Reader(MediaMemory(memory), **options)
    try:
        yield prepared
    finally:
        prepared.reader.cache.check()
        await prepared.reader.close()


async def test_pictures_become_items() -> None:
    async with _reader() as reader:
        (red,) = await reader.prepare(encoded(RED))
        (tiles,) = await reader.prepare(encoded(PLAIN), info=TILES)
    (item,) = red.items
    assert (item.length, item.pixels.shape, item.text_offsets, item.positions) == (4, (1, 28, 28, 3), None, None)
    np.testing.assert_array_equal(item.pixels, picture_pixels(SMALL.geometry, RED, red.layout))
    expected = picture_pixels(TILES.geometry, PLAIN, tiles.layout)
    np.testing.assert_array_equal(np.concatenate([item.pixels for item in tiles.items]), expected)
    assert len({item.hash for item in tiles.items}) == len(tiles.items) == 4


async def test_equal_pictures_are_decoded_once_and_have_equal_hashes() -> None:
    async with _reader() as reader:
        (first,), (second,) = await asyncio.gather(*(reader.prepare(encoded(RED)) for _ in range(2)))
        (third,) = await reader.prepare(encoded(RED))
        (other,) = await reader.prepare(encoded(PLAIN))
        (tiles,) = await reader.prepare(encoded(RED), info=TILES)
        assert sorted(reader.lookups) == [False, False, False, True, True]
    assert first.items[0].hash == second.items[0].hash == third.items[0].hash
    assert len({picture.items[0].hash for picture in (first, other, tiles)}) == 3
    np.testing.assert_array_equal(first.items[0].pixels, third.items[0].pixels)


async def test_who_waits_for_a_cancelled_request_prepares_the_picture_itself() -> None:
    large = encoded(drawn(900, 900), compress_level=0)
    async with _reader() as reader:
        reader.reader = PictureReader(
            PictureOptions(), reader.memory, max_size=8 << 20, on_lookup=reader.lookups.append
        )
        first = asyncio.create_task(reader.prepare(large))
        second = asyncio.create_task(reader.prepare(large))
        while not reader.reader.cache.under_way:
            await asyncio.sleep(0)
        first.cancel()
        (picture,) = await second
        assert picture.items[0].pixels.shape == (1, 28, 28, 3)
        assert first.cancelled() or reader.lookups == [False, True]


async def test_the_cache_keeps_what_was_used_last_within_its_bytes() -> None:
    one = 28 * 28 * 3
    async with _reader(mm_processor_cache_gb=2.5 * one / (1 << 30)) as reader:
        contents = [encoded(drawn(30, 30, seed=seed)) for seed in range(3)]
        for content in (contents[0], contents[1], contents[0], contents[2], contents[0], contents[1]):
            await reader.prepare(content)
        assert reader.lookups == [False, False, True, False, True, False]
        assert reader.reader.cache.size == 2 * one
    async with _reader(mm_processor_cache_gb=0) as reader:
        await reader.prepare(contents[0])
        await reader.prepare(contents[0])
        assert reader.lookups == [False, False]


async def test_a_request_keeps_pictures_for_its_next_prompts_until_somebody_needs_their_memory() -> None:
    async with _reader(mm_processor_cache_gb=0) as reader:
        with RequestCache(reader.memory, "a") as cache:
            for picture in (RED, RED, PLAIN, RED, PLAIN):
                await reader.prepare(encoded(picture), request_cache=cache, tenant="a")
            assert reader.lookups == [False, True, False, True, True]
            gc.collect()
            await asyncio.sleep(0)
            assert reader.memory.held == 2 * 28 * 28 * 3
            (await reader.memory.reserve(reader.memory.limit, "b")).close()
            await reader.prepare(encoded(RED), request_cache=cache, tenant="a")
            assert reader.lookups[5:] == [False]
        gc.collect()
        await asyncio.sleep(0)
        assert reader.memory.held == 0


async def test_a_name_stands_for_what_its_tenant_sent_with_it() -> None:
    async with _reader() as reader:
        (sent,) = await reader.prepare(encoded(RED), name="mine", tenant="a")
        (again,) = await reader.prepare(None, name="mine", tenant="a")
        assert again.items[0].hash == sent.items[0].hash
        for tenant, name in (("b", "mine"), ("a", "other"), ("a", None)):
            with pytest.raises(PictureError, match="not in the cache") as caught:
                await reader.prepare(None, tenant=tenant, name=name)
            assert caught.value.param == "messages[0].content[0]"


async def test_memory_is_held_as_long_as_the_items_live() -> None:
    async with _reader() as reader:
        pictures = await reader.prepare(encoded(RED), encoded(PLAIN), sequences=3)
        assert reader.memory.held == 2 * 4 * 28 * 28 * 3
        del pictures
        gc.collect()
        await asyncio.sleep(0)
        assert reader.memory.held == 0


async def test_too_many_tokens_and_too_little_memory_are_refused_before_decoding() -> None:
    broken_later = encoded(drawn(64, 64))[:2000]
    rows = PictureInfo(placeholder=1, placeholder_text="p", geometry=PatchRows(patch=4, longest_edge=64))
    async with _reader() as reader:
        with pytest.raises(PictureError, match=r"maximum context length is 100 tokens.*have 272") as caught:
            await reader.prepare(broken_later, info=rows)
        assert caught.value.param == "messages[0].content[0]"
    async with _reader(memory=50_000) as reader:
        with pytest.raises(PromptError, match="bytes of memory"):
            await reader.prepare(broken_later)
        assert reader.memory.held == 0


def _peaks(memory: MediaMemory) -> list[int]:
    """The bytes that are held, each time that they change."""
    peaks: list[int] = []
    add = memory.add

    def record(size: int, tenant: str) -> None:
        add(size, tenant)
        peaks.append(memory.held)

    memory.add = record  # type: ignore[method-assign]
    return peaks


async def test_a_picture_that_leaves_the_cache_while_it_is_waited_for_is_decoded_within_reserved_memory() -> None:
    content = encoded(drawn(300, 300))
    async with _reader() as reader:
        (first,) = await reader.prepare(content)
        with await reader.memory.reserve(reader.memory.limit - reader.memory.held, "somebody else"):
            waiting = asyncio.create_task(reader.prepare(content))
            while not reader.memory.waiting:
                await asyncio.sleep(0)
            reader.reader.cache.clear()
            peaks = _peaks(reader.memory)
        (again,) = await waiting
        assert reader.lookups == [False, False]
        assert max(peaks[1:]) >= 12 * 300 * 300
        np.testing.assert_array_equal(first.items[0].pixels, again.items[0].pixels)


async def test_what_a_long_picture_becomes_on_its_way_is_reserved() -> None:
    square = FixedSize(height=28, width=28, tokens=4, square_color=(0, 0, 0))
    async with _reader() as reader:
        peaks = _peaks(reader.memory)
        await reader.prepare(encoded(drawn(10, 2000)), info=msgspec.structs.replace(SMALL, geometry=square))
        assert max(peaks) >= 12 * 10 * 2000 + 3 * 2000 * 28


async def test_an_error_names_its_part_also_if_another_request_met_it() -> None:
    broken = encoded(drawn(64, 64))[:-500]
    async with _reader() as reader:
        results = await asyncio.gather(
            reader.prepare(broken), reader.prepare(encoded(RED), broken), return_exceptions=True
        )
        for place, error in enumerate(results):
            assert isinstance(error, PictureError)
            assert error.param == f"messages[0].content[{place}]"
            assert "broken or truncated" in str(error)
        assert reader.memory.held == 0


async def test_a_cancelled_request_gives_its_memory_back() -> None:
    async with _reader() as reader:
        task = asyncio.create_task(reader.prepare(encoded(RED)))
        while not reader.memory.held:
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert reader.memory.held == 0
        await reader.prepare(encoded(RED))
