"""Files are decoded in processes, one after the other for each tenant, and decoded audio is bounded."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from quire.config.options import AudioOptions
from quire.multimodal.audio.decode import AudioError
from quire.multimodal.audio.features import log_mel
from quire.multimodal.audio.reader import AudioReader
from tests.support.audio import encode, tone, wav


@asynccontextmanager
async def reading(held: int = 1 << 30, **options: object) -> AsyncIterator[AudioReader]:
    reader = AudioReader(AudioOptions.model_validate(options), held=held)
    try:
        yield reader
    finally:
        await reader.close()


async def test_a_file_is_decoded_and_a_broken_one_is_refused() -> None:
    async with reading() as reader:
        async with reader.decoded(io.BytesIO(encode(tone(60.0), "flac"))) as audio:
            np.testing.assert_allclose(audio.samples, tone(60.0)[:, 0], atol=1e-4)
        with pytest.raises(AudioError, match="broken"):
            async with reader.decoded(encode(tone(2.0), "flac")[:5000]):
                raise AssertionError("not reached")
        async with reader.decoded(wav(tone(1.0))) as audio:
            assert audio.seconds == 1.0


async def test_a_file_that_takes_too_much_memory_ends_only_its_process() -> None:
    async with reading(max_audio_seconds=30.0) as reader:
        with pytest.raises(AudioError):
            async with reader.decoded(encode(tone(40.0), "flac")):
                raise AssertionError("not reached")
        async with reader.decoded(wav(tone(1.0))) as audio:
            assert audio.seconds == 1.0


async def test_files_wait_while_much_decoded_audio_is_held() -> None:
    second = wav(tone(1.0))
    async with reading(held=100_000) as reader:  # a second takes 64,000 bytes
        first, other = reader.decoded(second), reader.decoded(second)
        await first.__aenter__()
        await other.__aenter__()
        waiting = reader.decoded(second)
        task = asyncio.create_task(waiting.__aenter__())
        gone = asyncio.create_task(reader.decoded(second).__aenter__())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), 0.3)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await first.__aexit__(None, None, None)
        assert (await task).seconds == 1.0
        await waiting.__aexit__(None, None, None)
        await other.__aexit__(None, None, None)
        async with reader.decoded(second) as audio:
            assert audio.seconds == 1.0


async def test_features_are_computed_beside_the_event_loop() -> None:
    samples = tone(2.0)[:, 0]
    async with reading() as reader:
        np.testing.assert_array_equal(await reader.log_mel(samples, 80, 30.0), log_mel(samples, 80, 30.0))
