"""Files are decoded in processes, one after the other for each tenant, and decoded audio is bounded."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from quire.config.media_options import AudioOptions
from quire.multimodal.audio.decode import AudioError
from quire.multimodal.audio.features import log_mel
from quire.multimodal.audio.reader import AudioReader
from tests.support.audio import encode, tone, wav


@asynccontextmanager
async def reading(held: int = 1 << 30, share: float = 1.0, **options: object) -> AsyncIterator[AudioReader]:
    reader = AudioReader(AudioOptions.model_validate(options), held=held, share=share)
    try:
        yield reader
    finally:
        await reader.close()


async def test_a_file_is_decoded_and_a_broken_one_is_refused() -> None:
    async with reading() as reader:
        audio = await reader.decode(io.BytesIO(encode(tone(60.0), "flac")))
        np.testing.assert_allclose(audio.samples, tone(60.0)[:, 0], atol=1e-4)
        with pytest.raises(AudioError, match="broken"):
            await reader.decode(encode(tone(2.0), "flac")[:5000])
        assert (await reader.decode(wav(tone(1.0)))).seconds == 1.0


async def test_audio_that_is_too_long_ends_no_process() -> None:
    async with reading(max_audio_seconds=30.0) as reader:
        with pytest.raises(AudioError, match="longer than 30 s"):
            await reader.decode(encode(tone(40.0), "flac"))
        assert (await reader.decode(wav(tone(1.0)))).seconds == 1.0


async def test_files_wait_while_much_decoded_audio_is_held() -> None:
    second = wav(tone(1.0))
    async with reading(held=100_000) as reader:  # a second takes 64,000 bytes
        audio = await reader.decode(second)
        with reader.hold(audio):
            with reader.hold(audio):
                waiting = asyncio.create_task(reader.decode(second))
                gone = asyncio.create_task(reader.decode(second))
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(waiting), 0.3)
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
            assert (await waiting).seconds == 1.0
        assert (await reader.decode(second)).seconds == 1.0


async def test_who_holds_much_audio_keeps_nobody_else_waiting() -> None:
    second = wav(tone(1.0))
    async with reading(held=100_000, share=0.6) as reader:
        audio = await reader.decode(second, tenant="a")
        with reader.hold(audio, tenant="a"):  # which are more than 60,000 bytes
            waiting = [asyncio.create_task(reader.decode(second, tenant="a")) for _ in range(2)]
            assert (await reader.decode(second, tenant="b")).seconds == 1.0
            assert not any(task.done() for task in waiting)
        assert [(await task).seconds for task in waiting] == [1.0, 1.0]


async def test_features_are_computed_beside_the_event_loop() -> None:
    samples = tone(2.0)[:, 0]
    async with reading() as reader:
        np.testing.assert_array_equal(await reader.log_mel(samples, 80, 30.0), log_mel(samples, 80, 30.0))
