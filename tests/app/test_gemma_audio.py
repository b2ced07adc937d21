"""Tiny models of Gemma that read audio and pictures, served as users do it: texts are those of transformers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import soundfile

from tests.support.audio import Samples, voice, wav
from tests.support.audio_chat import audio_url, input_audio
from tests.support.audio_chat import encoded as encoded_audio
from tests.support.gemma_audio import AUDIO, ENDS, GEMMA_AUDIO, expected_of_media, save_hearing, write_media_tokenizer
from tests.support.picture_chat import asked, image_url
from tests.support.pictures import drawn, encoded
from tests.support.process import ServerProcess, serving
from tests.support.vision_models import make_composite

FIRST, SECOND = voice(0.7), voice(0.55, hertz=210.0)
SEEN = drawn(60, 44)


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """transformers' models."""
    return {case: make_composite(case, seed=4, hears=True) for case in GEMMA_AUDIO}


@pytest.fixture(scope="module")
def folders(made: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    saved = {}
    for case, model in made.items():
        saved[case] = save_hearing(model, case, tmp_path_factory.mktemp("served") / case)
        write_media_tokenizer(case, saved[case])
    return saved


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[ServerProcess]:
    options = ("--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", "--max-num-batched-tokens", "80")
    with serving(*(str(folder) for folder in folders.values()), *options, "--max-num-seqs", "8") as running:
        yield running


def read(samples: Samples) -> Samples:
    """Samples as the server gets them, from a file of 16 bits."""
    read_samples: Samples = soundfile.read(io.BytesIO(wav(samples[:, None])), dtype="float32")[0]
    return read_samples


def post(server: ServerProcess, body: dict[str, Any]) -> Any:
    fields = {"max_tokens": 10, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with server.http as client:
        return client.post("/v1/chat/completions", json={**body, **fields})


@pytest.mark.parametrize("case", GEMMA_AUDIO)
def test_audio_beside_pictures(
    server: ServerProcess, made: dict[str, Any], folders: dict[str, Path], case: str
) -> None:
    """In one message, in the order of its parts, with the tokens around each that the processor writes."""
    url = f"data:audio/wav;base64,{encoded_audio(SECOND)}"
    parts: list[Any] = [
        "a",
        input_audio(encoded_audio(FIRST)),
        "b",
        image_url(encoded(SEEN)),
        audio_url(url),
        "c<|audio|>?",
    ]
    response = post(server, {**asked(*parts), "model": str(folders[case])})
    assert response.status_code == 200, response.text
    answer = response.json()
    prompt = answer["prompt_token_ids"]
    special = [token for index, token in enumerate(prompt) if token in ENDS[case] and token != prompt[index - 1]]
    audio, picture = ENDS[case][:3], ENDS[case][3:]
    assert special == [*audio, *picture, *audio]
    assert answer["usage"]["prompt_tokens_details"]["audio_tokens"] == prompt.count(AUDIO)
    expected = expected_of_media(made[case], case, prompt, [read(FIRST), SEEN, read(SECOND)], 10)
    assert answer["choices"][0]["token_ids"] == expected


@pytest.mark.parametrize("case", GEMMA_AUDIO)
def test_audio_that_is_too_long_or_too_short(server: ServerProcess, folders: dict[str, Path], case: str) -> None:
    """The processors would cut off its end, or make no token of it."""
    model = str(folders[case])
    response = post(server, {**asked(input_audio(encoded_audio(voice(2.1)))), "model": model})
    assert response.status_code == 400
    longest = "0.8" if case == "gemma3n" else "2"
    assert f"at most {longest} s in one audio part" in response.json()["error"]["message"]
    response = post(server, {**asked(input_audio(encoded_audio(voice(0.009)))), "model": model})
    assert response.status_code == (200 if case == "gemma4_unified" else 400)


@pytest.mark.parametrize("case", GEMMA_AUDIO)
def test_transcriptions(server: ServerProcess, folders: dict[str, Path], case: str) -> None:
    """Longer audio is transcribed in several windows."""
    with server.http as client:
        for seconds in (0.9, 3.1):
            files, fields = {"file": ("a.wav", wav(voice(seconds)[:, None]))}, {"model": str(folders[case])}
            response = client.post("/v1/audio/transcriptions", files=files, data={**fields, "language": "en"})
            assert response.status_code == 200, response.text
        cards = client.get("/v1/models").json()["data"]
    assert all(set(card["input_modalities"]) - {"video"} == {"text", "image", "audio"} for card in cards)
