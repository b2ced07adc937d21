"""Buffers, decoders and utterances without a connection."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import soxr
from hypothesis import given
from hypothesis import strategies as st

from quire.multimodal.audio.voice_activity import SpeechEvent, SpeechStarted, SpeechStopped
from quire.realtime.audio import PCM_16K, PCM_24K, PCMU, RATE, AudioDecoder, AudioFormat, Samples
from quire.realtime.errors import EventError
from quire.realtime.session import Outbound
from quire.realtime.settings import TurnDetection
from quire.realtime.turn_detection import AudioBuffer, TurnDetector, UtteranceEnded, UtteranceStarted
from tests.support.realtime import base64_of, dialogue


async def decoded(decoder: AudioDecoder, data: bytes) -> Samples:
    parts = [part async for part in decoder.decode(base64_of(data))]
    return np.concatenate(parts) if parts else np.empty(0, np.int16)


@pytest.mark.parametrize("audio_format", [PCM_16K, PCM_24K, PCMU])
async def test_pieces_of_any_size_give_the_same_samples(audio_format: AudioFormat) -> None:
    generator = random.Random(5)
    data = np.random.default_rng(5).integers(-9999, 9999, 50_000).astype("<i2").tobytes()
    whole = AudioDecoder(audio_format)
    expected = np.concatenate([await decoded(whole, data), whole.flush()])
    pieces, decoder, at = [], AudioDecoder(audio_format), 0
    while at < len(data):
        size = generator.choice((1, 2, 3, 999, 20_000))
        pieces.append(await decoded(decoder, data[at : at + size]))
        at += size
    got = np.concatenate([*pieces, decoder.flush()])
    assert len(got) == len(expected)
    assert np.abs(got.astype(int) - expected.astype(int)).max() <= 1
    assert len(expected) == pytest.approx(len(data) / audio_format.bytes_per_sample * RATE / audio_format.rate, abs=2)


async def test_resampled_audio_is_that_of_the_whole_resampled_at_once() -> None:
    samples = dialogue(1.0)
    at_24k = np.round(soxr.resample(samples.astype(np.float32), RATE, 24000)).astype("<i2")
    decoder = AudioDecoder(PCM_24K)
    got = np.concatenate([await decoded(decoder, at_24k.tobytes()), decoder.flush()])
    assert np.abs(got[: len(samples)].astype(int) - samples).max() < 60


async def test_refused_audio_changes_nothing() -> None:
    decoder = AudioDecoder(PCM_16K)
    for text in ("AAA", "A===", "AAAA AAAA", "A" * (1 << 18) + "*AAA"):
        with pytest.raises(EventError, match="base64"):
            _ = [part async for part in decoder.decode(text)]
    assert (await decoded(decoder, b"\x01\x00")).tolist() == [1]


@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 60_000)), max_size=12))
def test_a_buffer_holds_what_was_not_dropped(steps: list[tuple[int, int]]) -> None:
    buffer, everything = AudioBuffer(), np.empty(0, np.int16)
    for count, dropped in steps:
        added = np.arange(buffer.end, buffer.end + count, dtype=np.int64).astype(np.int16)
        everything = np.concatenate([everything, added])
        buffer.append(added)
        assert np.array_equal(buffer.copy(buffer.start, buffer.end), everything[buffer.start :])
        buffer.drop_before(buffer.start + dropped)
        assert np.array_equal(buffer.copy(0, 1 << 40), everything[buffer.start :])
        assert np.array_equal(
            buffer.copy(buffer.start + 5, buffer.end - 7),
            everything[buffer.start + 5 : max(buffer.end - 7, buffer.start + 5)],
        )


def test_a_buffer_does_not_grow_while_as_much_is_dropped() -> None:
    buffer = AudioBuffer()
    for _ in range(1000):
        buffer.append(np.zeros(1600, np.int16))
        buffer.drop_before(buffer.end - RATE)
    assert len(buffer._data) <= 4 * RATE
    assert buffer.end == 1_600_000


class Told:
    """Activity that notices what it is told."""

    def __init__(self) -> None:
        self.events: list[SpeechEvent] = []

    def push(self, samples: np.ndarray) -> list[SpeechEvent]:
        events, self.events = self.events, []
        return events


def test_utterances_do_not_overlap() -> None:
    """Whatever the padding says."""
    activity = Told()
    turns = TurnDetector(TurnDetection(), lambda _: activity, 600)
    second = np.ones(RATE, np.int16)
    activity.events = [SpeechStarted(100)]
    assert [type(event).__name__ for event in turns.push(second)] == ["UtteranceStarted"]
    activity.events = [SpeechStopped(20_000), SpeechStarted(15_000)]
    first, began = turns.push(second)
    assert isinstance(first, UtteranceEnded)
    assert (first.start, first.end, len(first.audio)) == (100, 20_000, 19_900)
    assert began.start == 20_000
    activity.events = [SpeechStopped(20_001)]
    (ended,) = turns.push(second)
    assert isinstance(ended, UtteranceEnded)
    assert ended.end - ended.start == RATE // 10


def test_streamed_utterances_are_split_at_their_end_after_the_longest_time() -> None:
    """Every sample is in exactly one of them: a model has read all samples of the utterance that is split."""
    activity = Told()
    turns = TurnDetector(TurnDetection(), lambda _: activity, 600)
    activity.events = [SpeechStarted(0)]
    events = [event for _ in range(1201) for event in turns.push(np.ones(RATE, np.int16), 600.0)]
    first, ended, second, *more = events
    assert isinstance(ended, UtteranceEnded)
    assert isinstance(first, UtteranceStarted)
    assert isinstance(second, UtteranceStarted)
    assert (ended.end, second.start) == (600 * RATE, 600 * RATE)
    assert len(ended.audio) == 600 * RATE
    assert len(more) == 2
    assert len(turns.current(RATE)) == 0
    assert len(turns.current()) == RATE


async def test_outbound_events_wait_for_room() -> None:
    outbound = Outbound(100)
    await outbound.put(b"a" * 90)
    waiting = asyncio.ensure_future(outbound.put(b"b" * 20))
    await asyncio.sleep(0)
    frame = await outbound.get()
    await asyncio.sleep(0)
    assert not waiting.done()  # the first one is being written
    await outbound.written(frame)
    await waiting
    large = asyncio.ensure_future(outbound.put(b"c" * 1000))
    await asyncio.sleep(0)
    assert outbound.size == 20
    await outbound.written(await outbound.get())
    await large
    flushed = asyncio.ensure_future(outbound.flushed())
    await asyncio.sleep(0)
    assert not flushed.done()
    await outbound.written(await outbound.get())
    await flushed
