"""Models that transcribe utterances while they are spoken: the audio they get, and the events that are sent."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.engine.client.errors import EngineOverloaded
from quire.protocol.errors import InvalidRequest
from quire.realtime.settings import SessionSettings
from quire.realtime.transcript import Transcript, Usage
from quire.speech.types import TranscriptDelta
from tests.support.realtime import RATE, FakeSpeech, as_floats, session_of, silence, speech, speech_server
from tests.support.server import until

PREFIX = "conversation.item.input_audio_transcription"
COMMITTED = "input_audio_buffer.committed"


@dataclass
class FakeStreaming:
    """A `StreamingTranscriber` that writes a word for each half second of audio.

    Attributes:
        max_seconds: see `StreamingTranscriber`.
        max_words: number of words after which it ends.
        failures: errors that it raises, one for each call.
        heard: samples of each utterance.
        running: number of calls in progress.
    """

    max_seconds: float = 600.0
    max_words: int = 1000
    failures: list[Exception] = field(default_factory=list)
    heard: list[NDArray[np.float32]] = field(default_factory=list)
    running: int = 0

    async def transcribe(
        self,
        audio: AsyncGenerator[NDArray[np.float32], None],
        settings: SessionSettings,
        send_text: Callable[[TranscriptDelta], Awaitable[None]],
    ) -> Transcript:
        if self.failures:
            raise self.failures.pop(0)
        number, words = len(self.heard), list[str]()
        self.heard.append(np.empty(0, np.float32))
        self.running += 1
        try:
            async for samples in audio:
                self.heard[number] = np.concatenate((self.heard[number], samples))
                while len(words) < len(self.heard[number]) // (RATE // 2):
                    words.append(f"u{number}w{len(words)} ")
                    await send_text(TranscriptDelta(words[-1]))
                    if len(words) == self.max_words:
                        return self._transcript(number, words)
            return self._transcript(number, words)
        finally:
            self.running -= 1

    def _transcript(self, number: int, words: list[str]) -> Transcript:
        return Transcript("".join(words), Usage(len(self.heard[number]) / RATE, 5, 4, 3))


async def test_a_model_gets_each_sample_once_and_its_text_is_sent_at_once(tmp_path: Path) -> None:
    model = FakeStreaming()
    said = np.concatenate([silence(0.5), speech(2.0)])
    async with speech_server(tmp_path, FakeSpeech(streaming=model)) as server, session_of(server) as client:
        await client.append(said)
        events = await client.until(f"{PREFIX}.delta")
        assert COMMITTED not in {event["type"] for event in events}
        await client.append(silence(1.0))
        events += await client.until(f"{PREFIX}.completed")
        deltas = [event["delta"] for event in events if event["type"] == f"{PREFIX}.delta"]
        assert "".join(deltas).strip() == events[-1]["transcript"]
        assert len(deltas) >= 4
        start = next(e["audio_start_ms"] for e in events if e["type"] == "input_audio_buffer.speech_started") * RATE
        whole = as_floats(np.concatenate([said, silence(1.0)]))[start // 1000 :, 0]
        np.testing.assert_array_equal(model.heard[0], whole[: len(model.heard[0])])
        assert len(model.heard[0]) >= 2 * RATE
        await client.append(np.concatenate([speech(1.0), silence(1.0)]))
        assert (await client.until(f"{PREFIX}.completed"))[-1]["transcript"].startswith("u1w0")


async def test_committed_audio_is_read_at_once(tmp_path: Path) -> None:
    model = FakeStreaming()
    async with (
        speech_server(tmp_path, FakeSpeech(streaming=model)) as server,
        session_of(server, turn_detection=None) as client,
    ):
        said = speech(1.7)
        await client.append(said)
        await client.send("input_audio_buffer.commit")
        await client.until(f"{PREFIX}.completed")
        np.testing.assert_array_equal(model.heard[0], as_floats(said)[:, 0])


async def test_a_text_that_ends_early_is_complete_with_the_utterance(tmp_path: Path) -> None:
    model = FakeStreaming(max_words=1)
    async with speech_server(tmp_path, FakeSpeech(streaming=model)) as server, session_of(server) as client:
        await client.append(np.concatenate([silence(0.5), speech(2.0)]))
        await client.until(f"{PREFIX}.delta")
        await until(lambda: not model.running)
        await client.append(silence(1.0))
        kinds = [event["type"] for event in await client.until(f"{PREFIX}.completed")]
        assert kinds.index(COMMITTED) < kinds.index(f"{PREFIX}.completed")


async def test_failures_are_sent_at_the_end_of_the_utterance(tmp_path: Path) -> None:
    model = FakeStreaming(failures=[InvalidRequest("not this one")])
    async with speech_server(tmp_path, FakeSpeech(streaming=model)) as server, session_of(server) as client:
        await client.append(np.concatenate([silence(0.5), speech(1.0), silence(1.0)]))
        events = await client.until(f"{PREFIX}.failed")
        assert events[-1]["error"]["message"] == "not this one"
        assert COMMITTED in [event["type"] for event in events]
        await client.append(np.concatenate([speech(1.0), silence(1.0)]))
        await client.until(f"{PREFIX}.completed")


async def test_a_full_queue_is_retried_without_loss_of_audio(tmp_path: Path) -> None:
    model = FakeStreaming(failures=[EngineOverloaded("full", retry_after=0), EngineOverloaded("full", retry_after=0)])
    async with speech_server(tmp_path, FakeSpeech(streaming=model)) as server, session_of(server) as client:
        await client.append(np.concatenate([silence(0.5), speech(1.5), silence(1.0)]))
        await client.until(f"{PREFIX}.completed")
        assert not model.failures
        assert len(model.heard[0]) >= 1.5 * RATE


async def test_long_utterances_are_split_at_their_end(tmp_path: Path) -> None:
    """Each sample is in exactly one of them."""
    model = FakeStreaming(max_seconds=1.0)
    async with speech_server(tmp_path, FakeSpeech(streaming=model)) as server, session_of(server) as client:
        said = np.concatenate([silence(0.5), speech(2.5), silence(1.0)])
        await client.append(said)
        started = (await client.until("input_audio_buffer.speech_started"))[-1]["audio_start_ms"] * RATE // 1000
        for _ in range(3):
            await client.until(f"{PREFIX}.completed")
        heard = np.concatenate(model.heard)
        np.testing.assert_array_equal(heard, as_floats(said)[started : started + len(heard), 0])


async def test_clearing_ends_the_transcription(tmp_path: Path) -> None:
    model = FakeStreaming()
    async with speech_server(tmp_path, FakeSpeech(streaming=model)) as server, session_of(server) as client:
        await client.append(np.concatenate([silence(0.5), speech(1.5)]))
        await client.until(f"{PREFIX}.delta")
        assert model.running == 1
        await client.send("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")
        await until(lambda: not model.running)
