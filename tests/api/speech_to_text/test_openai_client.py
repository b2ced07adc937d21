"""OpenAI's client: every response format, streams, and the fields that it encodes in its own way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from tests.support.audio import encode, wav
from tests.support.speech import SpeechCore, speech_server, spoken

AUDIO = spoken((300.0, 1.0), (600.0, 1.0))[:, None]
FILE = ("speech.wav", wav(AUDIO))


@asynccontextmanager
async def client_of(folder: Path, core: SpeechCore | None = None) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        speech_server(folder, core) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_every_response_format(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        create = client.audio.transcriptions.create
        parsed = await create(model="fake", file=FILE)
        assert parsed.text == "alpha bravo"
        assert parsed.usage is not None
        assert parsed.usage.type == "duration"
        assert parsed.usage.seconds == 4
        assert await create(model="fake", file=FILE, response_format="text") == "alpha bravo\n"
        assert "00:00:00,400 --> 00:00:01,400\nalpha" in await create(model="fake", file=FILE, response_format="srt")
        assert (await create(model="fake", file=FILE, response_format="vtt")).startswith("WEBVTT\n")
        verbose = await create(
            model="fake",
            file=FILE,
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
            chunking_strategy={"type": "server_vad", "threshold": 0.0, "silence_duration_ms": 3000},
        )
        assert verbose.segments is not None
        assert verbose.words is not None
        assert [segment.text for segment in verbose.segments] == [" alpha", " bravo"]
        assert [word.word for word in verbose.words] == ["alpha", "bravo"]
        assert verbose.language == "en"
        with pytest.raises(openai.BadRequestError, match="speaker diarization"):
            await create(model="fake", file=FILE, response_format="diarized_json")


async def test_streams_are_iterated_by_their_types(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        stream = await client.audio.transcriptions.create(
            model="fake", file=("a.webm", encode(AUDIO, "webm")), stream=True, include=["logprobs"]
        )
        events = [event async for event in stream]
        deltas = [event for event in events if event.type == "transcript.text.delta"]
        assert "".join(event.delta for event in deltas) == "alpha bravo"
        assert all(event.logprobs for event in deltas)
        last = events[-1]
        assert last.type == "transcript.text.done"
        assert last.text == "alpha bravo"
        assert last.usage is not None
        assert last.usage.input_tokens == 164


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
async def test_log_probabilities_and_translations(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        parsed = await client.audio.transcriptions.create(model="fake", file=FILE, include=["logprobs"])
        assert parsed.logprobs is not None
        assert "".join(entry.token or "" for entry in parsed.logprobs) == " alpha bravo"
        translated = await client.audio.translations.create(model="fake", file=FILE)
        assert translated.text == "alpha bravo"
        subtitles = await client.audio.translations.create(model="fake", file=FILE, response_format="srt")
        assert str(subtitles).startswith("1\n")


async def test_errors_are_those_of_the_client(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        with pytest.raises(openai.BadRequestError, match="Invalid or unsupported audio file"):
            await client.audio.transcriptions.create(model="fake", file=("a.mp3", b"no audio at all"))
        with pytest.raises(openai.NotFoundError):
            await client.audio.transcriptions.create(model="other", file=FILE)
