"""The bundled recognizer, served by plain `quire serve`, hears recordings of voices that training never used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
from numpy.typing import NDArray

from tests.support.audio import encode, wav
from tests.support.patience import PATIENCE
from tests.support.process import serving

NAME = "quire-nano-hear"
RECORDINGS = Path(__file__).parent / "recordings"
ENGLISH, NOISY = "We are going to the mountain in the morning.", "The town hall opens at 10:45."


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving() as running:
        yield running.url


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none") as opened:
        yield opened


def transcribe(client: openai.OpenAI, name: str, **options: Any) -> Any:
    with (RECORDINGS / name).open("rb") as file:
        return client.audio.transcriptions.create(model=NAME, file=file, **options)


def test_it_is_listed_with_its_task(server: str) -> None:
    tasks = {card["id"]: card["tasks"] for card in httpx.get(f"{server}/v1/models", timeout=PATIENCE).json()["data"]}
    assert tasks[NAME] == ["transcribe"]


@pytest.mark.parametrize(
    ("name", "language", "text"),
    [
        ("english.flac", "en", ENGLISH),
        ("german.flac", "de", "Öffne das Dachfenster in dem Esszimmer."),
        ("noisy.flac", "en", NOISY),
    ],
)
def test_writes_what_is_said_and_tells_the_language(client: openai.OpenAI, name: str, language: str, text: str) -> None:
    answer = transcribe(client, name, response_format="verbose_json")
    assert (answer.language, answer.text.strip()) == (language, text)


def test_times_and_subtitles_are_where_the_speech_is(client: openai.OpenAI) -> None:
    answer = transcribe(
        client, "english.flac", response_format="verbose_json", timestamp_granularities=["segment", "word"]
    )
    start, end = answer.segments[0].start, answer.segments[-1].end
    assert start == pytest.approx(0.3, abs=0.15)  # where the recording has its speech
    assert end == pytest.approx(answer.duration - 0.3, abs=0.15)
    assert " ".join(word.word for word in answer.words) == answer.text.strip()
    assert start - 0.1 <= answer.words[0].start < answer.words[-1].end <= end + 0.1
    assert " --> 00:00:0" in transcribe(client, "english.flac", response_format="srt")


def test_silence_has_no_text(client: openai.OpenAI) -> None:
    assert (
        client.audio.transcriptions.create(model=NAME, file=("a.wav", wav(np.zeros((32_000, 1), np.float32)))).text
        == ""
    )


def test_it_does_not_translate(server: str) -> None:
    with (RECORDINGS / "german.flac").open("rb") as file:
        answer = httpx.post(
            f"{server}/v1/audio/translations", files={"file": file}, data={"model": NAME}, timeout=PATIENCE
        )
    assert answer.status_code == 400
    assert "does not support translation" in answer.json()["error"]["message"]


def test_a_request_without_a_model_name_goes_to_it(server: str) -> None:
    with (RECORDINGS / "german.flac").open("rb") as file:
        answer = httpx.post(f"{server}/v1/audio/transcriptions", files={"file": file}, timeout=60)
    assert answer.json()["text"].strip() == "Öffne das Dachfenster in dem Esszimmer."


def samples_of(name: str) -> NDArray[np.float32]:
    """A recording, of shape (samples, 1)."""
    samples: NDArray[np.float32] = soundfile.read(RECORDINGS / name, dtype="float32", always_2d=True)[0]
    return samples


@pytest.mark.parametrize("kind", ["wav", "mp3", "opus", "m4a", "webm"])
def test_every_file_format_is_heard(client: openai.OpenAI, kind: str) -> None:
    file = ("speech", encode(samples_of("english.flac"), kind))
    assert client.audio.transcriptions.create(model=NAME, file=file).text == ENGLISH


def test_every_response_format(client: openai.OpenAI) -> None:
    assert transcribe(client, "english.flac", response_format="text") == f"{ENGLISH}\n"
    for kind, beginning in (("srt", r"1\n"), ("vtt", r"WEBVTT\n\n")):
        subtitles = transcribe(client, "english.flac", response_format=kind)
        assert re.match(rf"{beginning}00:00:00[,.]\d{{3}} --> 00:00:0[12][,.]\d{{3}}\n{ENGLISH}\n", subtitles)
    answer = transcribe(client, "english.flac", include=["logprobs"], chunking_strategy="auto")
    assert (answer.text, answer.usage.seconds) == (ENGLISH, 3)
    assert "".join(entry.token for entry in answer.logprobs).strip() == ENGLISH
    with pytest.raises(openai.BadRequestError, match="speaker diarization"):
        transcribe(client, "english.flac", response_format="diarized_json")


def test_streams(client: openai.OpenAI) -> None:
    *deltas, done = transcribe(client, "english.flac", stream=True)
    assert deltas
    assert "".join(event.delta for event in deltas) == done.text == ENGLISH
    assert done.usage.output_tokens > 0


def test_long_audio_loses_nothing_at_its_cuts_and_keeps_its_times(client: openai.OpenAI) -> None:
    """Windows are 10 s long."""
    pause = np.zeros((16_000, 1), np.float32)
    recordings = [np.concatenate([samples_of(name), pause]) for name in ("english.flac", "noisy.flac") * 5]
    starts = np.cumsum([0, *map(len, recordings)])[:-1] / 16_000 + 0.3
    file = ("long.wav", wav(np.concatenate(recordings)))
    answer = client.audio.transcriptions.create(
        model=NAME, file=file, language="en", response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert answer.text == " ".join([ENGLISH, NOISY] * 5)
    segments = answer.segments or []
    assert len({segment.seek for segment in segments}) >= 4
    assert [segment.start for segment in segments] == pytest.approx(starts.tolist(), abs=0.5)
