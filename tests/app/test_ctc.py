"""Tiny CTC models and a tiny Moonshine, served as users do it: their text is what transformers makes of the audio."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import ParakeetForCTC, Wav2Vec2CTCTokenizer

from tests.support.audio import Samples, voice, wav
from tests.support.ctc import expected_positions, make_ctc, save_ctc
from tests.support.moonshine import END, START, generated, make_moonshine, save_moonshine
from tests.support.process import ServerProcess, serving
from tests.support.speech import speech_tokenizer, write_speech_tokenizer

PATH = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {"wave": make_ctc("wav2vec2"), "band": make_ctc("parakeet"), "moon": make_moonshine()}


@pytest.fixture(scope="module")
def server(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    for name in ("wave", "band"):
        save_ctc(models[name], folder / name)
    save_moonshine(models["moon"], folder / "moon")
    write_speech_tokenizer(folder / "moon")
    with serving(*(str(folder / name) for name in models), "--dtype", "float32") as running:
        yield running


def pcm(samples: Samples) -> Samples:
    """What is left of samples in a 16-bit file."""
    return (np.round(samples * 32768) / 32768).astype(np.float32)


def post(server: ServerProcess, model: str, samples: Samples, **fields: Any) -> Any:
    with server.http as client:
        names = [card["id"] for card in client.get("/v1/models").json()["data"]]
        name = next(name for name in names if name.rstrip("/").endswith(model))
        files = {"file": ("speech.wav", wav(samples[:, None]))}
        response = client.post(PATH, files=files, data={"model": name, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_text_and_words_of_samples(server: ServerProcess, models: dict[str, Any], tmp_path: Path) -> None:
    samples = pcm(voice(4.0))
    folder = save_ctc(models["wave"], tmp_path)
    tokenizer = Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    reference = tokenizer.decode(
        expected_positions(models["wave"], samples)[:, 0].astype(int), output_word_offsets=True
    )
    assert len(reference.text) > 5
    options: dict[str, Any] = {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]}
    body = post(server, "wave", samples, **options)
    assert body["text"] == reference.text
    assert [word["word"] for word in body["words"]] == [word["word"] for word in reference.word_offsets]
    starts = [word["start_offset"] * 0.02 for word in reference.word_offsets]
    assert [word["start"] for word in body["words"]] == pytest.approx(starts, abs=1e-3)
    assert all(segment["end"] <= 4.0 for segment in body["segments"])


def test_text_of_a_spectrogram(server: ServerProcess, models: dict[str, Any]) -> None:
    samples = pcm(voice(3.0, hertz=180.0))
    model = models["band"]
    assert isinstance(model, ParakeetForCTC)
    tokens = expected_positions(model, samples)[:, 0].astype(int).tolist()
    body = post(server, "band", samples, response_format="verbose_json")
    blank = model.config.pad_token_id
    expected = [token for before, token in zip([None, *tokens], tokens, strict=False) if token not in (before, blank)]
    assert [token for segment in body["segments"] for token in segment["tokens"]] == expected
    assert len(expected) > 3
    assert "".join(body["text"].split()) != ""


def test_text_of_moonshine(server: ServerProcess, models: dict[str, Any]) -> None:
    samples = pcm(voice(2.0, hertz=150.0))
    tokens = generated(models["moon"], samples, 47, suppress_tokens=[START])
    expected = [token for token in tokens if token != END]
    body = post(server, "moon", samples, temperature="0.001")
    assert body["text"] == speech_tokenizer().decode(expected).strip()
    assert body["usage"]["output_tokens"] > 3


def test_the_engine_holds_nothing_afterwards(server: ServerProcess) -> None:
    assert server.metric("num_requests_running") == 0
    assert server.metric("audio_seconds_total") >= 9
