"""POST /v1/audio/languages: the language alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.audio import wav
from tests.support.audio_chat import AudioCore, audio_server
from tests.support.ctc_speech import CTCCore, write_characters
from tests.support.fake_core import FakeCore
from tests.support.server import Server, running_server, until
from tests.support.speech import SpeechCore, added, english_only, prompts, speaks, speech_server, spoken

PATH = "/v1/audio/languages"
AUDIO = wav(spoken((300.0, 1.0))[:, None])


async def send(server: Server, file: Any = AUDIO, **fields: Any) -> httpx.Response:
    return await server.http.post(PATH, files={"file": ("speech.wav", file)}, data=fields)


def refusal(response: httpx.Response, status: int = 400) -> tuple[str, str | None]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return error["message"], error["param"]


def likely(*probabilities: float) -> SpeechCore:
    """Probabilities of en, de and ja."""
    return SpeechCore(
        probs=lambda message: list(probabilities) if len(message.prompt) == 1 else [0.0],
    )


async def test_all_languages_have_a_probability_and_no_text_is_generated(tmp_path: Path) -> None:
    core = likely(0.1, 0.6, 0.3)
    async with speech_server(tmp_path, core) as server:
        response = await send(server, model="fake")
        assert response.json() == {
            "language": "de",
            "probability": pytest.approx(0.6),
            "languages": [
                {"code": "de", "probability": pytest.approx(0.6)},
                {"code": "ja", "probability": pytest.approx(0.3)},
                {"code": "en", "probability": pytest.approx(0.1)},
            ],
        }
        assert prompts(core) == []
        assert server.state.models[0].client.slots_in_use == 0
        transcribed = await server.http.post("/v1/audio/transcriptions", files={"file": ("a.wav", AUDIO)})
        assert transcribed.json()["languages"] == [{"code": "de"}]


async def test_the_languages_may_be_restricted(tmp_path: Path) -> None:
    async with speech_server(tmp_path, likely(0.1, 0.6, 0.3)) as server:
        body = (await send(server, **{"languages[]": ["en", "ja"]})).json()
        assert [(language["code"], language["probability"]) for language in body["languages"]] == [
            ("ja", pytest.approx(0.75)),
            ("en", pytest.approx(0.25)),
        ]
        assert body["language"] == "ja"
    async with speech_server(tmp_path, likely(1.0, 0.0, 0.0)) as server:
        assert (await send(server, **{"languages[]": ["de"]})).json()["probability"] == 1.0


async def test_of_long_audio_the_first_window_is_heard(tmp_path: Path) -> None:
    core = SpeechCore(probs=speaks("ja"))
    async with speech_server(tmp_path, core) as server:
        assert (await send(server, file=wav(spoken(*[(300.0, 4.0)] * 12)[:, None]))).json()["language"] == "ja"
        (request,) = added(core)
        assert request.audio_items[0].features.shape == (80, 3000)


async def test_models_that_cannot_are_refused(tmp_path: Path) -> None:
    servers = (
        speech_server(tmp_path / "en", english_only(SpeechCore())),
        running_server(tmp_path / "ctc", CTCCore(), write=write_characters),
        audio_server(tmp_path / "chat", AudioCore(kind="qwen3_asr")),
    )
    for starting in servers:
        async with starting as server:
            text, param = refusal(await send(server))
            assert "does not detect languages: only multilingual Whisper models do" in text
            assert param == "model"
    async with speech_server(tmp_path / "two", SpeechCore(), FakeCore()) as server:
        assert "supports: generate" in refusal(await send(server, model="fake-1"))[0]
        assert refusal(await send(server, model="nobody"), 404)[1] == "model"
        assert (await send(server)).status_code == 200


async def test_bad_forms_are_refused_by_field(tmp_path: Path) -> None:
    core = SpeechCore()
    async with speech_server(tmp_path, core) as server:
        assert refusal(await send(server, **{"languages[]": ["xx"]}))[1] == "languages"
        assert refusal(await send(server, timeout="soon"))[1] == "timeout"
        assert "audio" in refusal(await send(server, file=b"no audio"))[0]
        assert "no audio" in refusal(await send(server, file=wav(spoken()[:0, None])))[0]
        missing = await server.http.post(PATH, data={"model": "fake"}, files={"other": ("a", b"")})
        assert refusal(missing)[1] == "file"
        assert added(core) == []
        assert (await send(server, colour="red")).headers["x-quire-ignored-fields"] == "colour"


async def test_a_full_server_refuses_and_a_disconnect_leaves_nothing(tmp_path: Path) -> None:
    core = SpeechCore()
    core.hold.set()
    async with speech_server(tmp_path, core, capacity=1) as server:
        client = server.state.models[0].client
        first = asyncio.create_task(send(server))
        await until(lambda: core.active)
        assert "busy" in refusal(await send(server, file=b"not even audio"), 503)[0]
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await until(lambda: client.slots_in_use == 0 and client.open_streams == 0)
        core.hold.clear()
        await until(lambda: not core.active)
        assert (await send(server)).json()["language"] == "en"


async def test_a_timeout_ends_the_request(tmp_path: Path) -> None:
    core = SpeechCore()
    core.hold.set()
    async with speech_server(tmp_path, core) as server:
        refusal(await send(server, timeout="0.3"), 408)
        assert server.state.models[0].client.slots_in_use == 0
