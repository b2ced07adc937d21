"""What audio costs the front end: decoding, features, voice activity, alignment of words.

    python -m benchmarks.audio

Prints milliseconds, the smallest of five runs. Signals are synthetic; codecs are those of the test extra.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from quire.config.options import AudioOptions
from quire.multimodal.audio.cuts import cut
from quire.multimodal.audio.decode import DecodedAudio, decode
from quire.multimodal.audio.features import SAMPLE_RATE, log_mel
from quire.multimodal.audio.reader import AudioFile, AudioReader, AudioUse
from quire.multimodal.audio.voice_activity import VoiceActivity, find_speech
from quire.multimodal.memory import MediaMemory, Reservation
from quire.speech.words import starts_of_tokens
from tests.support.audio import Samples, encode, voice

RUNS = 5
MINUTE = 60


KINDS = (("wav", 44_100), ("flac", 44_100), ("mp3", 44_100), ("opus", 48_000), ("m4a", 44_100), ("webm", 48_000))


def resampled(samples: Samples, rate: int) -> Samples:
    """The same in stereo at another rate; good enough to have something to decode."""
    count = len(samples) * rate // SAMPLE_RATE
    places = np.arange(count) * SAMPLE_RATE / rate
    return np.repeat(np.interp(places, np.arange(len(samples)), samples)[:, None], 2, 1).astype(np.float32)


def best(work: Callable[[], object]) -> float:
    """Milliseconds of the fastest run."""
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def push_all(samples: Samples, size: int) -> None:
    """Detect voice activity in pieces of `size` samples."""
    detector = VoiceActivity()
    for start in range(0, len(samples), size):
        detector.push(samples[start : start + size])


async def read(reader: AudioReader, content: bytes) -> None:
    """Decode a file as for a transcription."""

    async def keep(_: int, audio: DecodedAudio, reservation: Reservation) -> None:
        reservation.pass_on(audio.samples, audio.samples.nbytes)

    use = AudioUse(while_made=lambda _: 0, result=lambda samples: 4 * samples)
    await reader.decode([AudioFile(io.BytesIO(content))], use, keep)


async def longest_wait_while_decoding(content: bytes) -> tuple[float, float]:
    """Milliseconds to decode a file in a process, and the longest time for which the event loop was held meanwhile."""
    reader = AudioReader(AudioOptions(), MediaMemory(1 << 30))
    await read(reader, encode(voice(1.0)[:, None], "wav"))  # starts the processes
    longest, running = 0.0, True

    async def watch() -> None:
        nonlocal longest
        before = time.perf_counter()
        while running:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, before = max(longest, now - before), now

    watching = asyncio.create_task(watch())
    start = time.perf_counter()
    await read(reader, content)
    taken = time.perf_counter() - start
    running = False
    await watching
    await reader.close()
    return 1000 * taken, 1000 * longest


def main() -> None:
    """Measure and print."""
    spoken = voice(30.0)
    minute = np.tile(spoken, 2)
    for bins in (80, 128):
        print(f"log-mel, 30 s, {bins} bins: {best(partial(log_mel, spoken, bins)):.1f} ms")
    print(f"log-mel, 2 s padded to 30 s: {best(lambda: log_mel(spoken[: 2 * SAMPLE_RATE], 80)):.1f} ms")
    frames = len(spoken) / 512
    print(f"voice activity, pieces of 20 ms: {best(lambda: push_all(spoken, 320)) / frames * 1000:.0f} us per 32 ms")
    print(f"voice activity, the whole audio: {best(lambda: find_speech(spoken)) / frames * 1000:.0f} us per 32 ms")
    print(f"cuts, 60 minutes: {best(lambda: cut(np.tile(minute, 60), 30.0)):.0f} ms")
    alignment = np.random.default_rng(0).random((200, 1500), np.float32)
    print(f"time warping, 200 tokens, 30 s: {best(lambda: starts_of_tokens(alignment)):.1f} ms")
    limits = AudioReader(AudioOptions(), MediaMemory(1 << 30)).limits
    for kind, rate in KINDS:
        content = encode(resampled(minute, rate), kind, rate=rate)
        taken = best(partial(decode, content, limits))
        print(f"decode 60 s of {kind}, {rate} Hz, stereo, {len(content) >> 10} KiB: {taken:.0f} ms")
    hour = encode(np.tile(minute, 60)[:, None], "mp3")
    taken, held = asyncio.run(longest_wait_while_decoding(hour))
    print(f"an hour of mp3, {len(hour) >> 20} MiB, through a process: {taken:.0f} ms")
    print(f"event loop held meanwhile: {held:.0f} ms at most")


if __name__ == "__main__":
    main()
