"""Client secrets: which spelling is valid, and the sessions that they open, with OpenAI's client."""

from __future__ import annotations

import string
import time
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from quire.realtime.secrets import ClientSecrets
from tests.support.realtime import speech_server

LOGPROBS = "item.input_audio_transcription.logprobs"


@pytest.mark.parametrize("session", [b"{}", b"{} ", b"{}  "])  # lengths whose last character has 0, 2 or 4 unused bits
def test_another_spelling_is_refused(session: bytes) -> None:
    secrets = ClientSecrets()
    text, _ = secrets.make(session, seconds=60, owner=None, form="ga")
    assert secrets.read(text) is not None
    last = [text[:-1] + char for char in string.ascii_letters + string.digits + "-_" if char != text[-1]]
    for other in (*last, text + "!", text + "=", text[:9] + "~" + text[9:], text + "\n"):
        assert secrets.read(other) is None, other


async def test_a_secret_opens_a_session_with_its_settings(tmp_path: Path) -> None:
    async with (
        speech_server(tmp_path, api_key=("k",)) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k") as owner,
    ):
        settings: Any = {
            "type": "transcription",
            "audio": {"input": {"turn_detection": None, "transcription": {"language": "de"}}},
            "include": [LOGPROBS],
        }
        secret = await owner.realtime.client_secrets.create(
            session=settings, expires_after={"anchor": "created_at", "seconds": 30}
        )
        assert secret.expires_at == pytest.approx(time.time() + 30, abs=10)
        assert secret.session.type == "transcription"
        assert secret.session.include == [LOGPROBS]
        async with (
            AsyncOpenAI(base_url=f"{server.url}/v1", api_key=secret.value) as guest,
            guest.realtime.connect(extra_query={"intent": "transcription"}) as connection,
        ):
            created: Any = await connection.recv()
            assert created.session.audio.input.turn_detection is None
            assert created.session.audio.input.transcription.language == "de"
            assert created.session.include == [LOGPROBS]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_secrets_of_the_beta_open_sessions_of_the_beta(tmp_path: Path) -> None:
    async with (
        speech_server(tmp_path, api_key=("k",)) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k") as owner,
    ):
        beta: Any = owner.beta.realtime  # its types know OpenAI's models only
        transcription = await beta.transcription_sessions.create(
            input_audio_format="g711_ulaw",
            input_audio_transcription={"model": "alias", "language": "de"},
            turn_detection={"type": "server_vad", "silence_duration_ms": 400},
            include=[LOGPROBS],
            client_secret={"expires_at": {"anchor": "created_at", "seconds": 600}},
        )
        assert transcription.client_secret.expires_at == pytest.approx(time.time() + 600, abs=10)
        assert transcription.input_audio_format == "g711_ulaw"
        spoken = await beta.sessions.create(
            model="alias",
            modalities=["text"],
            instructions="Be kind.",
            voice="alloy",
            turn_detection={"type": "server_vad", "threshold": 0.25},
        )
        assert spoken.client_secret.expires_at == pytest.approx(time.time() + 60, abs=10)
        assert (spoken.model, spoken.object) == ("alias", "realtime.session")
        sockets = server.url.replace("http", "ws") + "/v1"
        for session, query, kind, threshold, language in (
            (transcription, {"intent": "transcription"}, "transcription_session.created", 0.5, "de"),
            (spoken, {}, "session.created", 0.25, None),
        ):
            key = session.client_secret.value
            async with (
                AsyncOpenAI(base_url=f"{server.url}/v1", websocket_base_url=sockets, api_key=key) as guest,
                guest.beta.realtime.connect(model="fake", extra_query=query) as connection,
            ):
                created: Any = await connection.recv()
                assert created.type == kind
                settings = created.to_dict()["session"]
                assert settings["turn_detection"]["threshold"] == threshold
                assert settings["input_audio_transcription"]["language"] == language
                assert settings["input_audio_transcription"]["model"] == "alias"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_settings_of_secrets_are_checked_when_they_are_made(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        beta: Any = client.beta.realtime
        with pytest.raises(BadRequestError, match=r"session\.input_audio_format") as refused:
            await beta.sessions.create(input_audio_format="mp3")
        assert refused.value.param == "session.input_audio_format"
        with pytest.raises(NotFoundError, match="nobody"):
            await beta.sessions.create(model="nobody")
        with pytest.raises(BadRequestError, match="include"):
            await beta.transcription_sessions.create(include=["everything"])
        with pytest.raises(BadRequestError, match="seconds"):
            await beta.sessions.create(client_secret={"expires_after": {"anchor": "created_at", "seconds": 1}})
        for path in ("sessions", "transcription_sessions", "client_secrets"):
            answer = await server.post(f"/v1/realtime/{path}", {"colour": "red"})
            assert (answer.status_code, answer.headers["x-quire-ignored-fields"]) == (200, "colour")
