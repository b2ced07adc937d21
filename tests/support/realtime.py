"""Realtime sessions for tests: a model that hears one word in each half second, and clients."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import soxr
from numpy.typing import NDArray
from websockets.asyncio.client import ClientConnection, connect

from quire.protocol.errors import InvalidRequest
from quire.realtime.settings import SessionSettings
from quire.realtime.transcript import Transcript, Usage
from quire.realtime.utterance_transcriber import StreamingTranscriber
from quire.speech.types import TokenLogprob, TranscriptDelta
from tests.support.audio import voice
from tests.support.fake_core import INFO, FakeCore
from tests.support.patience import PATIENCE
from tests.support.server import Server, running_server
from tests.support.speech import SPEECH

RATE = 16000
_WORD = RATE // 2  # samples


def words(count: int, language: str | None = None) -> str:
    """What the model hears in so many half seconds."""
    return " ".join(f"{language or 'w'}{number}" for number in range(1, count + 1))


@dataclass
class FakeSpeech:
    """A model that transcribes without an engine.

    Attributes:
        go: passes wait for it.
        active: passes that have begun and not ended.
        heard: seconds of audio and settings of each pass.
        failure: what passes raise.
    """

    go: asyncio.Event = field(default_factory=asyncio.Event)
    active: int = 0
    heard: list[tuple[float, SessionSettings]] = field(default_factory=list)
    failure: Exception | None = None
    streaming: StreamingTranscriber | None = None

    def __post_init__(self) -> None:
        self.go.set()

    def check(self, settings: SessionSettings) -> None:
        if settings.language == "xx":
            raise InvalidRequest("Unsupported language: 'xx'.", "language")

    async def transcribe(
        self, audio: NDArray[np.float32], settings: SessionSettings, *, draft: bool
    ) -> AsyncGenerator[TranscriptDelta | Transcript, None]:
        self.active += 1
        self.heard.append((len(audio) / RATE, settings))
        try:
            await self.go.wait()
            if self.failure is not None:
                raise self.failure
            text = words(len(audio) // _WORD, settings.language)
            logprobs = list[TokenLogprob]()
            for number, word in enumerate(text.split()):
                await asyncio.sleep(0)
                entry = TokenLogprob(f" {word}", -number / (2 if draft else 4), f" {word}".encode())
                logprobs.append(entry)
                yield TranscriptDelta(entry.token if number else word, (entry,) if settings.logprobs else ())
            usage = Usage(len(audio) / RATE, audio_tokens=len(audio) // _WORD, text_tokens=4, output_tokens=3)
            yield Transcript(text, usage, settings.language, tuple(logprobs) if settings.logprobs else None)
        finally:
            self.active -= 1


@asynccontextmanager
async def speech_server(folder: Path, speech: FakeSpeech | None = None, **settings: Any) -> AsyncIterator[Server]:
    """A server of one model that transcribes, `fake`."""
    core = FakeCore(info=msgspec.structs.replace(INFO, kind=SPEECH))
    async with running_server(folder, core, speech=speech or FakeSpeech(), **settings) as server:
        yield server


class Client:
    """A client of /v1/realtime."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    async def send(self, kind: str, **fields: Any) -> None:
        await self.connection.send(json.dumps({"type": kind, **fields}))

    async def append(self, samples: NDArray[np.int16], seconds: float = 0.1, rate: int = RATE) -> None:
        """Send audio in chunks."""
        for start in range(0, len(samples), step := int(rate * seconds)):
            await self.send("input_audio_buffer.append", audio=base64_of(samples[start : start + step]))

    async def update(self, **audio_input: Any) -> dict[str, Any]:
        """Change settings, in GA."""
        await self.send("session.update", session={"type": "transcription", "audio": {"input": audio_input}})
        return await self.expect("session.updated")

    async def receive(self) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE):
            event: dict[str, Any] = json.loads(await self.connection.recv())
        return event

    async def until(self, *kinds: str) -> list[dict[str, Any]]:
        """All events up to one of these types."""
        events = [await self.receive()]
        while events[-1]["type"] not in kinds:
            events.append(await self.receive())
        return events

    async def expect(self, kind: str) -> dict[str, Any]:
        """The next event, which is of this type."""
        event = await self.receive()
        assert event["type"] == kind, event
        return event


@asynccontextmanager
async def client_of(server: Server, query: str = "?model=fake", **options: Any) -> AsyncIterator[Client]:
    """A connected client."""
    url = server.url.replace("http", "ws") + "/v1/realtime" + query
    async with connect(url, compression=None, max_size=None, **options) as connection:
        yield Client(connection)


@asynccontextmanager
async def session_of(server: Server, rate: int = RATE, **audio_input: Any) -> AsyncIterator[Client]:
    """A client of a session in GA, for PCM of this rate."""
    async with client_of(server) as client:
        await client.expect("session.created")
        await client.update(format={"type": "audio/pcm", "rate": rate}, **audio_input)
        yield client


def pcm(samples: NDArray[np.float32]) -> NDArray[np.int16]:
    """16-bit samples."""
    return (samples * 32767).astype(np.int16)


def speech(seconds: float) -> NDArray[np.int16]:
    """Something like speech at 16 kHz."""
    return pcm(voice(seconds))


def silence(seconds: float) -> NDArray[np.int16]:
    """Nothing but a little noise."""
    return np.random.default_rng(0).integers(-3, 4, int(seconds * RATE)).astype(np.int16)


def dialogue(*seconds: float, pause: float = 1.0) -> NDArray[np.int16]:
    """Utterances of these lengths, with silence around each."""
    parts = [silence(pause)]
    for length in seconds:
        parts += [speech(length), silence(pause)]
    return np.concatenate(parts)


def as_floats(samples: NDArray[np.int16]) -> NDArray[np.float32]:
    """One channel of a file, of shape (samples, 1)."""
    return samples[:, None].astype(np.float32) / np.float32(32768)


def at_24k(samples: NDArray[np.int16]) -> NDArray[np.int16]:
    """The same at OpenAI's rate."""
    resampled: NDArray[np.float32] = soxr.resample(samples.astype(np.float32), RATE, 24000)
    return np.round(resampled).astype(np.int16)


def base64_of(samples: NDArray[Any] | bytes) -> str:
    """The `audio` of an event."""
    return base64.b64encode(samples if isinstance(samples, bytes) else samples.tobytes()).decode()


def update(audio_input: dict[str, Any]) -> str:
    session = {"type": "transcription", "audio": {"input": audio_input}}
    return json.dumps({"type": "session.update", "event_id": "mine", "session": session})
