"""A tiny whisper with random weights, served as users do it: what comes out is what transformers generates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from tests.support.audio import Samples, encode, voice, wav
from tests.support.models import draw_weights
from tests.support.process import ServerProcess, serving
from tests.support.speech import END, LANGUAGES, TIMES, TOKEN, VOCAB, speech_tokenizer, write_speech_tokenizer
from tests.support.variants import slow_but

PATH = "/v1/audio/transcriptions"
GREEDY = {"temperature": "0.001"}  # not 0, which would decode unlikely text again
TARGETS = 64
SUPPRESSED = [1, 2, *(token for token in TOKEN.values() if token not in (END, TOKEN["<|notimestamps|>"]))]


@pytest.fixture(scope="module")
def whisper() -> Any:
    torch.manual_seed(3)
    config = WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=80,
        d_model=64,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_target_positions=TARGETS,
        pad_token_id=END,
        bos_token_id=END,
        eos_token_id=END,
        decoder_start_token_id=TOKEN["<|startoftranscript|>"],
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    config._attn_implementation = "eager"
    model: Any = WhisperForConditionalGeneration(config).eval()
    draw_weights(model, "whisper")
    generation = GenerationConfig(
        decoder_start_token_id=TOKEN["<|startoftranscript|>"],
        eos_token_id=END,
        pad_token_id=END,
        bos_token_id=END,
        max_length=TARGETS,
    )
    for name, value in {
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": TOKEN[f"<|{code}|>"] for code in LANGUAGES},
        "task_to_id": {name: TOKEN[f"<|{name}|>"] for name in ("transcribe", "translate")},
        "no_timestamps_token_id": TOKEN["<|notimestamps|>"],
        "prev_sot_token_id": TOKEN["<|startofprev|>"],
        "max_initial_timestamp_index": 50,
        "suppress_tokens": SUPPRESSED,
        "begin_suppress_tokens": [220, END],
        "alignment_heads": [[0, 0], [1, 3]],
    }.items():
        setattr(generation, name, value)
    model.generation_config = generation
    return model


@pytest.fixture(scope="module")
def server(whisper: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("whisper")
    whisper.save_pretrained(folder)
    write_speech_tokenizer(folder)
    with serving(str(folder), "--dtype", "float32", "--served-model-name", "whisper") as running:
        yield running


def post(server: ServerProcess, audio: bytes, **fields: Any) -> Any:
    with server.http as client:
        response = client.post(PATH, files={"file": ("speech", audio)}, data=fields)
    assert response.status_code == 200, response.text
    return response


def generated(whisper: Any, samples: Samples, **options: Any) -> list[int]:
    """Tokens of transformers, without the prompt and the end."""
    features = WhisperFeatureExtractor()(samples, sampling_rate=16_000, return_tensors="pt").input_features
    with torch.inference_mode():
        output = whisper.generate(features, do_sample=False, force_unique_generate_call=True, **options)
    tokens = [int(token) for token in output[0]]
    return [token for token in tokens if token not in (END, *SUPPRESSED)]


def pcm(samples: Samples) -> Samples:
    """What is left of samples in a 16-bit file."""
    return (np.round(samples * 32768) / 32768).astype(np.float32)


@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_tokens_with_timestamps_are_those_of_transformers(server: ServerProcess, whisper: Any, task: str) -> None:
    samples = pcm(voice(4.0))
    expected = generated(whisper, samples, language="de", task=task, return_timestamps=True)
    path = PATH if task == "transcribe" else "/v1/audio/translations"
    with server.http as client:
        fields = {"language": "de", "response_format": "verbose_json", **GREEDY}
        files = {"file": ("speech.wav", wav(samples[:, None]))}
        body = client.post(path, files=files, data=fields).json()
    tokens = [token for segment in body["segments"] for token in segment["tokens"]]
    assert [token for token in tokens if token < TIMES] == [token for token in expected if token < TIMES]
    assert len(tokens) > 10
    times = {token for token in expected if token >= TIMES}
    assert {token for token in tokens if token >= TIMES} <= times
    assert body["segments"][0]["no_speech_prob"] < 1
    assert all(segment["end"] <= 4.0 for segment in body["segments"])


def test_text_without_timestamps_and_the_detected_language_are_those_of_transformers(
    server: ServerProcess, whisper: Any
) -> None:
    samples = pcm(voice(3.0, hertz=210.0))
    features = WhisperFeatureExtractor()(samples, sampling_rate=16_000, return_tensors="pt").input_features
    with torch.inference_mode():
        language = int(whisper.detect_language(features)[0])
    code = next(code for code in LANGUAGES if TOKEN[f"<|{code}|>"] == language)
    body = post(server, encode(samples[:, None], "flac"), **GREEDY).json()
    assert body["languages"] == [{"code": code}]
    never = [*SUPPRESSED, TOKEN["<|notimestamps|>"], *range(TIMES, VOCAB)]
    expected = generated(
        whisper, samples, language=code, task="transcribe", return_timestamps=False, suppress_tokens=never
    )
    shown = speech_tokenizer().decode(expected).strip()
    assert body["text"] == shown
    assert len(shown) > 10
    stream = post(server, wav(samples[:, None]), stream="true", **GREEDY).text
    events = [json.loads(line.removeprefix("data: ")) for line in stream.split("\n\n") if line]
    assert events[-1]["text"] == "".join(event["delta"] for event in events[:-1]) == shown


@pytest.mark.parametrize(
    ("beams", "penalty", "task"),
    slow_but(
        [(1, 1.0, "transcribe"), (2, 1.0, "translate"), (4, 1.0, "transcribe"), (4, 0.2, "transcribe")],
        (2, 1.0, "translate"),
        (4, 0.2, "transcribe"),
    ),
)
def test_the_text_of_beam_search_is_that_of_transformers(
    server: ServerProcess, whisper: Any, beams: int, penalty: float, task: str
) -> None:
    samples = pcm(voice(3.0, hertz=180.0))
    never = [*SUPPRESSED, TOKEN["<|notimestamps|>"], *range(TIMES, VOCAB)]
    options = {"language": "de", "task": task, "return_timestamps": False, "suppress_tokens": never}
    expected = generated(whisper, samples, num_beams=beams, length_penalty=penalty, **options)
    path = PATH if task == "transcribe" else "/v1/audio/translations"
    fields = {"language": "de", "use_beam_search": "true", "n": str(beams), "length_penalty": str(penalty)}
    with server.http as client:
        response = client.post(path, files={"file": ("speech.wav", wav(samples[:, None]))}, data=fields)
    assert response.status_code == 200, response.text
    assert response.json()["text"] == speech_tokenizer().decode(expected).strip()
    assert len(response.json()["text"]) > 10


def test_long_audio_with_beam_search_and_log_probabilities(server: ServerProcess) -> None:
    """One window after the other; the text is the same as in plain text."""
    audio = encode(voice(40.0)[:, None], "flac")
    fields: dict[str, Any] = {"use_beam_search": "true", "n": "3", "language": "de", "max_completion_tokens": "24"}
    body = post(server, audio, **{"include[]": "logprobs"}, **fields).json()
    tokens = body["usage"]["output_tokens"]
    assert tokens - 2 <= len(body["logprobs"]) <= tokens  # two windows, whose ends have no text
    assert all(entry["logprob"] < 0 for entry in body["logprobs"])
    assert post(server, audio, response_format="text", **fields).text.strip() == body["text"]
    assert tokens > 40


def test_long_audio_has_growing_times_and_words(server: ServerProcess) -> None:
    audio = encode(np.concatenate([voice(20.0), voice(25.0, hertz=200.0), voice(21.5)])[:, None], "mp3")
    options = {"timestamp_granularities[]": ["word", "segment"], "response_format": "verbose_json", "language": "en"}
    options["max_completion_tokens"] = "20"
    body = post(server, audio, **options, **GREEDY).json()
    assert body["duration"] == pytest.approx(66.5, abs=0.2)
    assert body["usage"]["seconds"] in (67, 68)
    seeks = {segment["seek"] for segment in body["segments"]}
    assert len(seeks) == 3
    assert all(2000 < two - seek <= 3000 for seek, two in pairwise(sorted(seeks)))
    times = [time for segment in body["segments"] for time in (segment["start"], segment["end"])]
    assert times == sorted(times)
    assert times[-1] <= body["duration"]
    words = body["words"]
    assert len(words) >= 3
    assert all(word["start"] <= word["end"] <= body["duration"] for word in words)
    assert [word["start"] for word in words] == sorted(word["start"] for word in words)


def test_unlikely_text_is_tried_at_higher_temperatures(server: ServerProcess) -> None:
    body = post(server, wav(voice(2.0)[:, None]), language="en", response_format="verbose_json").json()
    assert {segment["temperature"] for segment in body["segments"]} <= {0.0, 0.2, 0.4, 0.6, 0.8, 1.0}
    assert server.metric("audio_seconds_total") > 0


def test_other_endpoints_name_the_tasks(server: ServerProcess) -> None:
    with server.http as client:
        body = {"messages": [{"role": "user", "content": "hello"}]}
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert "supports: transcribe" in response.json()["error"]["message"]
        assert client.get("/v1/models").json()["data"][0]["tasks"] == ["transcribe"]
        for _ in range(200):
            if server.metric("num_requests_running") == 0:
                break
        assert server.metric("kv_cache_blocks_used") == 0
