"""A tiny Voxtral Realtime behind the endpoints: transcriptions of files, and sessions while audio arrives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.multimodal.audio.frames import frames_of
from quire.serving.models import ServedModel
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
    left_nothing,
    read,
    transcribed,
    vllm_session,
)
from tests.support.realtime import pcm, session_of, silence, speech
from tests.support.server import until
from tests.support.streaming_models import (
    expected_tokens,
    make_streaming_model,
    save_streaming_model,
    streaming_info,
    streaming_server,
    text_of,
    write_streaming_tokenizer,
)

LIMIT = 12345.0  # seconds


@pytest.fixture(scope="module")
def model() -> Any:
    made = make_streaming_model(seed=3)
    made.generation_config.eos_token_id = None
    return made


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_streaming_model(model, tmp_path_factory.mktemp("served"))
    write_streaming_tokenizer(folder)
    return folder


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token ends the text, so that an utterance is open until its audio ends, however fast the engine is."""
    monkeypatch.setattr(ServedModel, "eos_token_ids", ())


def expected(model: Any, folder: Path, samples: Samples) -> tuple[str, int, int]:
    """What transformers makes of audio in 16 bits: the text, how many tokens up to the end, and which begins a word."""
    info = streaming_info(folder)
    tokens = expected_tokens(model, info.prompt, frames_of(read(samples), info))
    end = [index for index, token in enumerate(tokens) if token == 257]
    words = [index for index, token in enumerate(tokens) if token < 256 and text_of([token])]
    return text_of(tokens), end[0] + 1 if end else len(tokens), words[0]


async def test_transcriptions_are_those_of_transformers(model: Any, folder: Path) -> None:
    samples = voice(2.3)
    text, tokens, first = expected(model, folder, samples)
    assert len(text) > 10
    async with streaming_server(folder) as server:
        response = await transcribed(server, samples, include=["logprobs"])
        assert response.status_code == 200, response.text
        assert response.json()["text"] == text
        assert response.json()["logprobs"]
        assert (await transcribed(server, samples, response_format="text")).text.strip() == text
        whole = (await transcribed(server, samples, response_format="verbose_json")).json()
        assert whole["text"] == text
        times = [time for segment in whole["segments"] for time in (segment["start"], segment["end"])]
        assert times == sorted(times)
        assert times[-1] <= 2.3
        assert times[0] == pytest.approx(0.08 * first)
        assert "".join(segment["text"] for segment in whole["segments"]).strip() == text
        streamed = await transcribed(server, samples, stream="true")
        events = [
            json.loads(line.removeprefix("data: ")) for line in streamed.text.splitlines() if line[:6] == "data: "
        ]
        deltas = [event["delta"] for event in events if event["type"] == "transcript.text.delta"]
        assert len(deltas) > 3
        assert "".join(deltas) == events[-1]["text"] == text
        usage = events[-1]["usage"]
        assert usage["input_token_details"] == {"audio_tokens": -(-len(samples) // FRAME), "text_tokens": 36}
        assert usage["output_tokens"] == tokens
        await left_nothing(server)


async def test_long_files_are_cut_where_the_context_ends(model: Any, folder: Path) -> None:
    """Each window is transcribed by itself; all of them together are the text."""
    samples = np.concatenate([voice(1.4), np.zeros(8000, np.float32), voice(1.2, hertz=180.0)])
    async with streaming_server(folder) as roomy:
        whole = (await transcribed(roomy, samples)).json()["text"]
    async with streaming_server(folder, max_model_len=80) as server:
        response = (await transcribed(server, samples, response_format="verbose_json")).json()
        assert len({segment["seek"] for segment in response["segments"]}) == 2
        assert response["text"] != whole
        await left_nothing(server)


async def test_what_the_model_cannot_do_is_refused_by_name(folder: Path) -> None:
    samples = voice(0.5)
    async with streaming_server(folder) as server:
        for field, value in (("language", "en"), ("prompt", "words"), ("hotwords", "words")):
            response = await transcribed(server, samples, **{field: value})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == field
        words = await transcribed(
            server, samples, response_format="verbose_json", **{"timestamp_granularities[]": "word"}
        )
        assert words.status_code == 400
        assert (await transcribed(server, samples, "translations")).status_code == 400
        chat = await server.post("/v1/chat/completions", asked("hi", input_audio(encoded(samples)), model="fake"))
        assert chat.status_code == 400
        assert chat.json()["error"]["message"] == (
            "Unsupported task: 'generate'. The model `fake` supports: transcribe."
        )
        card = (await server.http.get("/v1/models")).json()["data"][0]
        assert (card["input_modalities"], card["tasks"]) == (["audio"], ["transcribe"])


async def test_committed_audio_gives_the_text_of_a_file(model: Any, folder: Path) -> None:
    samples = voice(1.7)
    text, tokens, _ = expected(model, folder, samples)
    async with streaming_server(folder) as server:
        async with session_of(server, turn_detection=None) as client:
            await client.send("session.update", session={"include": ["item.input_audio_transcription.logprobs"]})
            await client.expect("session.updated")
            await client.append(as_pcm(samples))
            await client.send("input_audio_buffer.commit")
            events = await client.until(COMPLETED)
        assert events[-1]["transcript"] == text == "".join(e["delta"] for e in events if e["type"] == DELTA)
        entries = events[-1]["logprobs"]
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode(errors="replace").strip() == text
        assert all(entry["logprob"] < 0 for entry in entries)
        assert [entry for e in events if e["type"] == DELTA for entry in e["logprobs"]] == entries
        usage = events[-1]["usage"]
        assert usage["input_token_details"] == {"audio_tokens": -(-len(samples) // FRAME), "text_tokens": 36}
        assert usage["output_tokens"] == tokens
        await left_nothing(server)


@pytest.mark.parametrize("dialect", ["ga", "beta", "vllm"])
async def test_deltas_come_while_one_speaks(folder: Path, dialect: str) -> None:
    async with streaming_server(folder) as server:
        await check_deltas(server, dialect)


async def test_utterances_come_in_order_and_each_begins_anew(folder: Path) -> None:
    """One encoder: the second utterance waits for the first, and loses nothing."""
    audio = np.concatenate([silence(0.6), speech(1.5), silence(1.2), speech(1.5), silence(1.2)])
    texts = []
    for memory in (1, 1 << 28):
        async with streaming_server(folder, encoder_cache_memory=memory) as server, session_of(server) as client:
            await client.append(audio)
            events = [*await client.until(COMPLETED), *await client.until(COMPLETED)]
            items = [event["item_id"] for event in events if event["type"] in (DELTA, COMPLETED)]
            assert items == sorted(items, key=items.index)
            texts.append([event["transcript"] for event in events if event["type"] == COMPLETED])
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("endless")
async def test_cleared_and_killed_sessions_leave_nothing_in_the_engine(folder: Path) -> None:
    async with streaming_server(folder) as server:
        await check_cleared_and_killed_sessions(server)


@pytest.fixture
def expire(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Makes the latest timeout of `LIMIT` seconds expire now; False: it has been left, and there is no other yet."""
    timeouts = list[asyncio.Timeout]()
    timeout_of = asyncio.timeout

    def recorded(delay: float | None) -> asyncio.Timeout:
        timeout = timeout_of(delay)
        if delay == LIMIT:
            timeouts.append(timeout)
        return timeout

    def expire() -> bool:
        try:
            timeouts[-1].reschedule(asyncio.get_running_loop().time())
        except RuntimeError:
            return False
        return True

    monkeypatch.setattr(asyncio, "timeout", recorded)
    return expire


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize(
    ("setting", "code"), [("realtime_idle_timeout", "session_idle"), ("realtime_session_timeout", "session_expired")]
)
async def test_timeouts_free_what_an_open_utterance_holds(
    folder: Path, setting: str, code: str, expire: Callable[[], bool]
) -> None:
    """Its end was never committed."""
    async with streaming_server(folder, settings={setting: LIMIT}) as server:
        engine = server.state.models[0].client
        async with vllm_session(server) as client:
            await client.append(np.concatenate([silence(0.5), speech(1.5)]))
            await client.until("transcription.delta")
            assert engine.open_streams == 1
            await until(expire)
            assert (await client.until("error"))[-1]["code"] == code
            await client.connection.wait_closed()
        await left_nothing(server)


@pytest.mark.usefixtures("endless")
async def test_an_engine_that_dies_fails_the_utterance(folder: Path) -> None:
    async with streaming_server(folder) as server:
        await check_death(server)


async def test_wrong_rates_are_refused(folder: Path) -> None:
    async with streaming_server(folder) as server, session_of(server) as client:
        audio_input = {"format": {"type": "audio/pcm", "rate": 44_100}}
        await client.send("session.update", session={"type": "transcription", "audio": {"input": audio_input}})
        assert "rate" in (await client.expect("error"))["error"]["message"]
        await client.append(pcm(np.concatenate([np.zeros(8000, np.float32), voice(1.0), np.zeros(16_000, np.float32)])))
        assert (await client.until(COMPLETED))[-1]["transcript"]
