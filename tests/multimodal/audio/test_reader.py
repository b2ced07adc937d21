"""Files are decoded in processes, within memory that is reserved before."""

from __future__ import annotations

import asyncio
import gc
import io
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from quire.config.options import AudioOptions
from quire.multimodal.audio.decode import AudioError, DecodedAudio
from quire.multimodal.audio.features import log_mel
from quire.multimodal.audio.reader import AudioFile, AudioReader, AudioUse
from quire.multimodal.errors import PromptError
from quire.multimodal.memory import MediaMemory, Reservation
from tests.support.audio import encode, tone, wav
from tests.support.server import until

USE = AudioUse(while_made=lambda _: 0, result=lambda count: 4 * count)
HOUR = encode(np.zeros((3600 * 1000, 1), np.float32), "flac", rate=1000)  # 11 kB
HOUR_BYTES = 4 * 3600 * 16_000


@asynccontextmanager
async def reading(share: float = 1.0, memory: int = 1 << 30, **options: object) -> AsyncIterator[AudioReader]:
    reader = AudioReader(AudioOptions.model_validate(options), MediaMemory(memory, share), share=share)
    try:
        yield reader
    finally:
        await reader.close()


async def keep(_: int, audio: DecodedAudio, reservation: Reservation) -> DecodedAudio:
    reservation.pass_on(audio.samples, audio.samples.nbytes)
    return audio


async def decoded(reader: AudioReader, *contents: bytes, tenant: str = "") -> Sequence[DecodedAudio]:
    files = [AudioFile(io.BytesIO(content), f"part {index}") for index, content in enumerate(contents)]
    return await reader.decode(files, USE, keep, tenant=tenant)


async def test_a_file_is_decoded_and_a_broken_one_is_refused() -> None:
    async with reading() as reader:
        (audio,) = await decoded(reader, encode(tone(60.0), "flac"))
        np.testing.assert_allclose(audio.samples, tone(60.0)[:, 0], atol=1e-4)
        with pytest.raises(AudioError, match="broken") as refused:
            await decoded(reader, wav(tone(1.0)), encode(tone(2.0), "flac")[:5000])
        assert refused.value.param == "part 1"
        assert [audio.seconds for audio in await decoded(reader, wav(tone(1.0)), wav(tone(2.0)))] == [1.0, 2.0]


async def test_audio_that_is_too_long_ends_no_process() -> None:
    async with reading(max_audio_seconds=30.0) as reader:
        with pytest.raises(AudioError, match="longer than 30 s"):
            await decoded(reader, encode(tone(40.0), "flac"))
        assert (await decoded(reader, wav(tone(1.0))))[0].seconds == 1.0


async def test_memory_is_reserved_before_a_small_file_of_an_hour_is_decoded() -> None:
    """For its samples here and in the worker; afterwards for what is kept, as long as it is."""
    async with reading() as reader:
        peaks: list[int] = []
        add = reader.memory.add

        def record(size: int, tenant: str) -> None:
            add(size, tenant)
            peaks.append(reader.memory.held)

        reader.memory.add = record  # type: ignore[method-assign]
        (audio,) = await decoded(reader, HOUR)
        assert len(HOUR) < 20_000
        assert audio.seconds == 3600.0
        assert max(peaks) >= 2 * HOUR_BYTES
        assert reader.memory.held == HOUR_BYTES
        del audio
        await until(lambda: gc.collect() >= 0 and reader.memory.held == 0)


async def test_files_wait_for_memory_and_those_who_leave_give_theirs_back() -> None:
    async with reading(memory=600 << 20) as reader:
        (first,) = await decoded(reader, HOUR, tenant="a")
        waiting = asyncio.create_task(decoded(reader, HOUR, tenant="a"))
        gone = asyncio.create_task(decoded(reader, HOUR, tenant="a"))
        await until(lambda: reader.memory.waiting == 2)
        (other,) = await decoded(reader, wav(tone(1.0)), tenant="b")  # is not held up by them
        assert other.seconds == 1.0
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert reader.memory.waiting == 1
        del first, other
        assert (await waiting)[0].seconds == 3600.0
        del waiting
        running = asyncio.create_task(decoded(reader, HOUR, tenant="c"))
        await until(lambda: reader.memory.held > 2 * HOUR_BYTES)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        del running
        await until(lambda: gc.collect() >= 0 and reader.memory.held == 0)


async def test_what_can_never_fit_is_refused_with_the_limit() -> None:
    async with reading(memory=64 << 20) as reader:
        with pytest.raises(PromptError, match=r"this server has 67108864 for all media \(--max-media-memory\)"):
            await decoded(reader, HOUR)
        assert (await decoded(reader, wav(tone(60.0))))[0].seconds == 60.0


async def test_a_length_that_the_header_does_not_tell_is_bounded_while_decoding() -> None:
    """The worker stops where the reservation ends; then there is one for the longest audio that is accepted."""
    content = bytearray(encode(np.zeros((600 * 1000, 1), np.float32), "flac", rate=1000))
    content[21] &= 0xF0
    content[22:26] = bytes(4)  # the number of samples
    async with reading(max_audio_seconds=700.0) as reader:
        assert (await decoded(reader, bytes(content)))[0].seconds == pytest.approx(600.0, abs=5)
    async with reading(memory=64 << 20) as reader:
        with pytest.raises(PromptError, match="--max-media-memory"):
            await decoded(reader, bytes(content))


async def test_the_audio_of_several_files_is_reserved_at_once() -> None:
    """So that two requests do not wait for each other's memory; and all that a request keeps is counted."""
    minute = encode(np.zeros((60 * 1000, 1), np.float32), "flac", rate=1000)
    async with reading(memory=64 << 20) as reader:
        with pytest.raises(PromptError, match="--max-media-memory"):
            await decoded(reader, *[minute] * 20)

        async def seconds(tenant: str) -> list[float]:
            return [audio.seconds for audio in await decoded(reader, *[minute] * 6, tenant=tenant)]

        assert await asyncio.gather(*map(seconds, "abab")) == [[60.0] * 6] * 4


async def test_who_holds_much_audio_keeps_nobody_else_waiting() -> None:
    second = wav(tone(1.0))
    async with reading(share=0.75, memory=1 << 20) as reader:
        with await reader.memory.reserve(500_000, "a"):
            waiting = [asyncio.create_task(decoded(reader, second, tenant="a")) for _ in range(2)]
            await until(lambda: reader.memory.waiting == 2)
            assert (await decoded(reader, second, tenant="b"))[0].seconds == 1.0
            assert not any(task.done() for task in waiting)
        assert [(await task)[0].seconds for task in waiting] == [1.0, 1.0]


async def test_features_are_computed_beside_the_event_loop() -> None:
    samples = tone(2.0)[:, 0]
    async with reading() as reader:
        np.testing.assert_array_equal(await reader.log_mel(samples, 80, 30.0), log_mel(samples, 80, 30.0))
