"""Tiny models that read audio, served as users do it: what comes out is what transformers generates."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import soundfile

from quire.engine.client.audio import AudioInfo
from quire.engine.models.model_config import read_model_config
from quire.multimodal.audio.items import token_count
from tests.support.audio import Samples, voice, wav
from tests.support.audio_chat import (
    ENDS,
    KINDS,
    PLACEHOLDERS,
    SPANS,
    TOKEN,
    VOCAB,
    asked,
    audio_tokenizer,
    encoded,
    input_audio,
    write_audio_tokenizer,
)
from tests.support.audio_models import expected_tokens, make_audio_model, save_audio_model
from tests.support.process import ServerProcess, serving

FIRST, SECOND = voice(0.9), voice(0.55, hertz=210.0)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    made = {}
    for kind in KINDS:
        made[kind] = make_audio_model(kind, seed=4, placeholder=TOKEN[PLACEHOLDERS[kind]])
        assert made[kind].config.get_text_config().vocab_size == VOCAB
    return made


@pytest.fixture(scope="module")
def folders(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for kind in KINDS:
        made[kind] = save_audio_model(models[kind], tmp_path_factory.mktemp("served") / kind)
        write_audio_tokenizer(kind, made[kind])
        path = made[kind] / "generation_config.json"
        generation = json.loads(path.read_text())
        path.write_text(json.dumps({**generation, "eos_token_id": TOKEN[ENDS[kind]]}))
    return made


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[ServerProcess]:
    """One server of all of them."""
    options = ("--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", "--max-num-batched-tokens", "32")
    with serving(*(str(folder) for folder in folders.values()), *options, "--max-num-seqs", "8") as running:
        yield running


def read(samples: Samples) -> Samples:
    """Samples as the server gets them, from a file of 16 bits."""
    resampled: Samples = soundfile.read(io.BytesIO(wav(samples[:, None])), dtype="float32")[0]
    return resampled


def info_of(folder: Path) -> AudioInfo:
    info = read_model_config(folder).facts.audio
    assert info is not None
    return info


@pytest.mark.parametrize("kind", KINDS)
def test_chats(server: ServerProcess, models: dict[str, Any], folders: dict[str, Path], kind: str) -> None:
    body = asked("x", input_audio(encoded(FIRST)), "and", input_audio(encoded(SECOND)), "?")
    body |= {"model": str(folders[kind]), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with server.http as client:
        response = client.post("/v1/chat/completions", json={**body, "return_token_ids": True})
    assert response.status_code == 200, response.text
    answer = response.json()
    prompt = answer["prompt_token_ids"]
    info = info_of(folders[kind])
    assert prompt.count(info.placeholder) == token_count(len(FIRST), info) + token_count(len(SECOND), info)
    expected = expected_tokens(models[kind], prompt, [read(FIRST), read(SECOND)], 12)
    assert answer["choices"][0]["token_ids"] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_transcriptions(server: ServerProcess, models: dict[str, Any], folders: dict[str, Path], kind: str) -> None:
    fields = {"model": str(folders[kind]), "language": "en", "max_completion_tokens": "10", "temperature": "0.001"}
    with server.http as client:
        response = client.post("/v1/audio/transcriptions", files={"file": ("a.wav", wav(FIRST[:, None]))}, data=fields)
    assert response.status_code == 200, response.text
    text = {
        "voxtral": "<s>[INST]X[/INST]lang:en[TRANSCRIBE]",
        "qwen3_asr": "<|im_start|>user\nX<|im_end|>\n<|im_start|>assistant\nlanguage English<asr_text>",
        "granite_speech": "<|im_start|>user\nXcan you transcribe the speech into a written format? It is in English."
        "<|im_end|>\n",
        "phi4_multimodal": "<|im_start|>user\nXTranscribe the audio clip into text. It is in English.<|im_end|>\n",
        "qwen2_audio": "<|im_start|>user\nXTranscribe the speech word for word, without comments. It is in English."
        "<|im_end|>\n<|im_start|>assistant\n",
    }[kind]
    info = info_of(folders[kind])
    many = PLACEHOLDERS[kind] * token_count(len(FIRST), info)
    prompt = audio_tokenizer().encode(text.replace("X", SPANS[kind].replace(PLACEHOLDERS[kind], many))).ids
    expected = expected_tokens(models[kind], prompt, [read(FIRST)], 10)
    end = TOKEN[ENDS[kind]]
    expected = expected[: expected.index(end)] if end in expected else expected
    assert response.json()["text"] == audio_tokenizer().decode(expected, skip_special_tokens=True).strip()
    fields = {**fields, "temperature": "0", "use_beam_search": "true"}
    with server.http as client:
        files = {"file": ("a.wav", wav(FIRST[:, None]))}
        single, three = (
            client.post("/v1/audio/transcriptions", files=files, data={**fields, "n": n}) for n in ("1", "3")
        )
    assert single.json()["text"] == response.json()["text"]  # one beam is greedy decoding
    assert three.status_code == 200, three.text


def test_models_tell_what_they_read(server: ServerProcess) -> None:
    with server.http as client:
        cards = client.get("/v1/models").json()["data"]
    assert len(cards) >= 3
    assert all(card["input_modalities"] == ["text", "audio"] for card in cards)
