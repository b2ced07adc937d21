"""A tiny Nemotron Speech Streaming behind the endpoints: transcriptions of files, and sessions while audio arrives."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.multimodal.audio.frames import frames_of
from tests.support.audio import Samples, voice
from tests.support.audio_chat import asked, encoded, input_audio
from tests.support.live import (
    COMPLETED,
    DELTA,
    FRAME,
    as_pcm,
    check_cleared_and_killed_sessions,
    check_death,
    check_deltas,
    core_server,
    left_nothing,
    read,
    transcribed,
)
from tests.support.realtime import Client, session_of
from tests.support.transducer_models import (
    BLANK,
    PIECES,
    expected_tokens,
    make_transducer,
    save_transducer,
    text_of,
    transducer_info,
)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_transducer()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_transducer(model, tmp_path_factory.mktemp("served"))


def tokens_of(model: Any, folder: Path, samples: Samples) -> list[int]:
    """What transformers makes of audio in 16 bits, with the blanks."""
    return expected_tokens(model, frames_of(read(samples), transducer_info(folder)))


def words_of(tokens: list[int]) -> list[tuple[str, int]]:
    """The words in generated tokens, and the frame at which each begins."""
    frame, symbols, words = 0, 0, list[tuple[str, int]]()
    for token in tokens:
        if token != BLANK and (not words or PIECES[token].startswith("\u2581")):
            words.append((PIECES[token].lstrip("\u2581"), frame))
        elif token != BLANK:
            words[-1] = (words[-1][0] + PIECES[token], words[-1][1])
        symbols = 0 if token == BLANK or symbols == 2 else symbols + 1
        frame += symbols == 0
    return words


async def test_transcriptions_are_those_of_transformers(model: Any, folder: Path) -> None:
    samples = voice(2.3)
    tokens = tokens_of(model, folder, samples)
    text = text_of(tokens)
    assert len(text) > 20
    async with core_server(folder) as server:
        response = await transcribed(server, samples, include=["logprobs"])
        assert response.status_code == 200, response.text
        assert response.json()["text"] == text
        shown = [token for token in tokens if token != BLANK]
        assert len(response.json()["logprobs"]) == len(shown)
        assert (await transcribed(server, samples, response_format="text")).text.strip() == text
        fields: dict[str, Any] = {
            "response_format": "verbose_json",
            "timestamp_granularities[]": ["segment", "word"],
        }
        whole = (await transcribed(server, samples, **fields)).json()
        assert whole["text"] == text
        words = words_of(tokens)
        assert [word["word"] for word in whole["words"]] == [word for word, _ in words]
        assert [word["start"] for word in whole["words"]] == pytest.approx([0.08 * frame for _, frame in words])
        assert "".join(segment["text"] for segment in whole["segments"]).split() == text.split()
        assert whole["segments"][-1]["end"] <= 2.3
        streamed = await transcribed(server, samples, stream="true")
        events = [
            json.loads(line.removeprefix("data: ")) for line in streamed.text.splitlines() if line[:6] == "data: "
        ]
        deltas = [event["delta"] for event in events if event["type"] == "transcript.text.delta"]
        assert "".join(deltas) == events[-1]["text"] == text
        usage = events[-1]["usage"]
        assert usage["input_token_details"] == {"audio_tokens": -(-len(samples) // FRAME), "text_tokens": 0}
        assert usage["output_tokens"] == len(shown)
        limited = (await transcribed(server, samples, max_completion_tokens="4")).json()
        assert limited["text"] == text_of(shown[:4])
        await left_nothing(server)


async def test_long_files_are_cut_where_the_context_ends(folder: Path) -> None:
    """Each window is transcribed by itself; all of them together are the text."""
    samples = np.concatenate([voice(1.4), np.zeros(8000, np.float32), voice(1.2, hertz=180.0)])
    async with core_server(folder, max_model_len=25) as server:
        response = (await transcribed(server, samples, response_format="verbose_json")).json()
        assert len({segment["seek"] for segment in response["segments"]}) == 2
        await left_nothing(server)


async def test_very_short_audio_is_transcribed(model: Any, folder: Path) -> None:
    async with core_server(folder) as server:
        for count in (1, 160, 2000):
            samples = voice(1.0)[:count]
            response = await transcribed(server, samples)
            assert response.status_code == 200, response.text
            if count >= 160:
                assert response.json()["text"] == text_of(tokens_of(model, folder, samples))
        await left_nothing(server)


async def test_what_the_model_cannot_do_is_refused_by_name(folder: Path) -> None:
    samples = voice(0.5)
    async with core_server(folder) as server:
        fields = {"language": "en", "prompt": "words", "hotwords": "words", "temperature": "0.5", "top_p": "0.5"}
        for field, value in fields.items():
            response = await transcribed(server, samples, **{field: value})
            assert response.status_code == 400, field
            assert response.json()["error"]["param"] == field
        assert (await transcribed(server, samples, seed="3")).status_code == 200
        assert (await transcribed(server, samples, "translations")).status_code == 400
        chat = await server.post("/v1/chat/completions", asked("hi", input_audio(encoded(samples)), model="fake"))
        assert chat.status_code == 400
        assert "supports: transcribe" in chat.json()["error"]["message"]
        card = (await server.http.get("/v1/models")).json()["data"][0]
        assert (card["input_modalities"], card["tasks"]) == (["audio"], ["transcribe"])


async def committed(client: Client, samples: Samples) -> list[dict[str, Any]]:
    """The events of an utterance that the client commits."""
    await client.append(as_pcm(samples))
    await client.send("input_audio_buffer.commit")
    return await client.until(COMPLETED)


@pytest.mark.parametrize("count", [27_200, 27_260, 57 * 160 + 80])
async def test_committed_audio_gives_the_text_of_a_file(model: Any, folder: Path, count: int) -> None:
    """Of the second and third no features are left when the audio ends; the third is whole chunks long."""
    samples = voice(2.0)[:count]
    tokens = tokens_of(model, folder, samples)
    async with core_server(folder) as server:
        async with session_of(server, turn_detection=None) as client:
            events = await committed(client, samples)
        text = text_of(tokens)
        assert events[-1]["transcript"] == text == "".join(e["delta"] for e in events if e["type"] == DELTA)
        usage = events[-1]["usage"]
        assert usage["input_token_details"] == {"audio_tokens": -(-len(samples) // FRAME), "text_tokens": 0}
        assert usage["output_tokens"] == sum(token != BLANK for token in tokens)
        await left_nothing(server)


async def test_sessions_at_once_have_the_texts_that_they_have_alone(model: Any, folder: Path) -> None:
    """Some wait for a state: there is memory for two."""
    audio = [voice(1.0 + index / 4, hertz=100.0 + 30 * index) for index in range(5)]
    expected = [text_of(tokens_of(model, folder, samples)) for samples in audio]
    assert len(set(expected)) > 2
    async with core_server(folder, encoder_cache_memory=25_000) as server:

        async def transcripts_of(samples: Samples) -> list[str]:
            async with session_of(server, turn_detection=None) as client:
                return [(await committed(client, samples))[-1]["transcript"] for _ in range(2)]

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(transcripts_of(samples)) for samples in audio]
            file = group.create_task(transcribed(server, audio[0]))
        assert [task.result() for task in tasks] == [[text, text] for text in expected]
        assert file.result().json()["text"] == expected[0]
        await left_nothing(server)


@pytest.mark.parametrize("dialect", ["ga", "vllm"])
async def test_deltas_come_while_one_speaks(folder: Path, dialect: str) -> None:
    async with core_server(folder) as server:
        await check_deltas(server, dialect)


async def test_cleared_and_killed_sessions_leave_nothing_in_the_engine(folder: Path) -> None:
    async with core_server(folder) as server:
        await check_cleared_and_killed_sessions(server)


async def test_an_engine_that_dies_fails_the_utterance(folder: Path) -> None:
    async with core_server(folder) as server:
        await check_death(server)
