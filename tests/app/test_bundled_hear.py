"""The bundled recognizer, served by plain `quire serve`, hears recordings of voices that training never used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.support.audio import wav
from tests.support.process import serving

NAME = "quire-nano-hear"
RECORDINGS = Path(__file__).parent / "recordings"


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
    tasks = {card["id"]: card["tasks"] for card in httpx.get(f"{server}/v1/models").json()["data"]}
    assert tasks[NAME] == ["transcribe"]


@pytest.mark.parametrize(
    ("name", "language", "text"),
    [
        ("english.flac", "en", "We are going to the mountain in the morning."),
        ("german.flac", "de", "Ich habe heute Morgen eine Münze gefunden."),
        ("noisy.flac", "en", "The town hall opens at 10:45."),
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
        answer = httpx.post(f"{server}/v1/audio/translations", files={"file": file}, data={"model": NAME})
    assert answer.status_code == 400
    assert "does not support translation" in answer.json()["error"]["message"]


def test_a_request_without_a_model_name_goes_to_it(server: str) -> None:
    with (RECORDINGS / "german.flac").open("rb") as file:
        answer = httpx.post(f"{server}/v1/audio/transcriptions", files={"file": file}, timeout=60)
    assert answer.json()["text"].strip() == "Ich habe heute Morgen eine Münze gefunden."
