"""Who may open a session, and how sessions end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.support.realtime import (
    FakeSpeech,
    base64_of,
    client_of,
    dialogue,
    session_of,
    silence,
    speech,
    speech_server,
)
from tests.support.server import Server, running_server, until

COMPLETED = "conversation.item.input_audio_transcription.completed"


async def refusal(server: Server, query: str = "?model=fake", **options: Any) -> tuple[int, dict[str, Any]]:
    """Status and error of an upgrade that is refused."""
    with pytest.raises(InvalidStatus) as caught:
        async with client_of(server, query, **options):
            pass
    response = caught.value.response
    return response.status_code, json.loads(response.body or b"")["error"]


async def test_a_key_is_needed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with speech_server(tmp_path, api_key=("k1", "k2")) as server:
        status, error = await refusal(server)
        assert (status, error["type"]) == (401, "AuthenticationError")
        assert (await refusal(server, additional_headers={"Authorization": "Bearer k3"}))[0] == 401
        assert (await refusal(server, subprotocols=["realtime", "openai-insecure-api-key.k3"]))[0] == 401
        assert not [record for record in caplog.records if record.name != "quire.access"]
        async with client_of(server, additional_headers={"Authorization": "Bearer k2"}) as client:
            await client.expect("session.created")
        offered = ["realtime", "openai-insecure-api-key.k1", "openai-beta.realtime-v1"]
        async with client_of(server, "?intent=transcription", subprotocols=offered) as client:
            assert client.connection.subprotocol == "realtime"
            await client.expect("transcription_session.created")
        async with client_of(server, subprotocols=["openai-insecure-api-key.k1"]) as client:
            await client.expect("session.created")


async def secret_of(server: Server, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return await server.http.post(f"/v1/realtime/{path}", json=body, headers=headers)


async def test_secrets_open_sessions_and_nothing_else(tmp_path: Path) -> None:
    async with speech_server(tmp_path, api_key=("k",)) as server:
        assert (await secret_of(server, "client_secrets", {})).status_code == 401
        session = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}
        body = {"expires_after": {"anchor": "created_at", "seconds": 10}, "session": session}
        made = (await secret_of(server, "client_secrets", body, authorization="Bearer k")).json()
        assert made["session"]["audio"]["input"]["turn_detection"] is None
        secret = made["value"]
        for options in (
            {"additional_headers": {"Authorization": f"Bearer {secret}"}},
            {"subprotocols": ["realtime", f"openai-insecure-api-key.{secret}"]},
        ):
            async with client_of(server, "", **options) as client:
                created = await client.expect("session.created")
                assert created["session"]["audio"]["input"]["turn_detection"] is None
        headers = {"authorization": f"Bearer {secret}"}
        assert (await server.http.get("/v1/models", headers=headers)).status_code == 401
        assert (await secret_of(server, "client_secrets", {}, **headers)).status_code == 401
        changed = secret[:-1] + ("A" if secret[-1] != "A" else "B")
        for wrong in (changed, "ek_", "ek_" + "A" * 100, "ek_ä"):
            status, _ = await refusal(
                server, additional_headers=[("Authorization", f"Bearer {wrong}".encode().decode("latin-1"))]
            )
            assert status == 401


async def test_an_expired_secret_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with speech_server(tmp_path) as server:
        body = {"expires_after": {"seconds": 60}}
        made = (await secret_of(server, "client_secrets", body)).json()
        headers = {"Authorization": f"Bearer {made['value']}"}
        async with client_of(server, additional_headers=headers) as client:
            await client.expect("session.created")
        monkeypatch.setattr("quire.realtime.secrets.time.time", lambda: made["expires_at"] + 1.0)
        assert (await refusal(server, additional_headers=headers))[0] == 401


async def test_secrets_of_the_beta(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        made = (await secret_of(server, "transcription_sessions", {"input_audio_format": "g711_alaw"})).json()
        assert made["input_audio_format"] == "g711_alaw"
        headers = {"Authorization": f"Bearer {made['client_secret']['value']}"}
        async with client_of(server, "", additional_headers=headers) as client:
            created = await client.expect("transcription_session.created")
            assert created["session"]["input_audio_format"] == "g711_alaw"


async def test_secrets_for_impossible_sessions_are_refused(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        for body, status, param in (
            ({"session": {"audio": {"input": {"format": {"type": "mp3"}}}}}, 400, "session.audio.input.format.type"),
            ({"session": {"audio": {"input": {"transcription": {"model": "no"}}}}}, 404, "model"),
            ({"session": {"audio": {"input": {"transcription": {"prompt": "a" * 9000}}}}}, 400, "session"),
            ({"expires_after": {"seconds": 5}}, 400, "expires_after.seconds"),
        ):
            answer = await secret_of(server, "client_secrets", body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_impossible_sessions_are_refused_before_the_upgrade(tmp_path: Path) -> None:
    async with speech_server(tmp_path / "a") as server:
        assert (await refusal(server, "?model=nobody"))[0] == 404
        assert (await refusal(server, "?call_id=5"))[0] == 400
        answer = await server.http.get("/v1/realtime")
        assert (answer.status_code, answer.headers["upgrade"]) == (426, "websocket")
        with pytest.raises(InvalidStatus) as caught:
            async with client_of(server, "/other"):
                pass
        assert caught.value.response.status_code == 404
    async with running_server(tmp_path / "b", speech=FakeSpeech()) as server:
        status, error = await refusal(server, "?intent=transcription")
        assert status == 404
        assert "'transcribe'" in error["message"]


async def test_pages_of_other_origins_are_refused(tmp_path: Path) -> None:
    async with speech_server(tmp_path / "a", allowed_origins=("https://good.example",)) as server:
        assert (await refusal(server, origin="https://evil.example"))[0] == 403
        for origin in (server.url, "https://good.example"):
            async with client_of(server, origin=origin) as client:
                await client.expect("session.created")
    async with (
        speech_server(tmp_path / "b", api_key=("k",)) as server,
        client_of(server, origin="https://any.example", additional_headers={"Authorization": "Bearer k"}) as client,
    ):
        await client.expect("session.created")


async def test_host_names_are_checked_as_for_requests(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        address = server.url.removeprefix("http://").split(":")
        with pytest.raises(InvalidStatus) as caught:
            async with connect("ws://evil.example/v1/realtime", host=address[0], port=int(address[1])):
                pass
        assert caught.value.response.status_code == 421


async def test_the_number_of_sessions_is_bounded(tmp_path: Path) -> None:
    async with speech_server(tmp_path, max_realtime_sessions=2) as server:
        async with client_of(server) as first, client_of(server) as second:
            await first.expect("session.created")
            await second.expect("session.created")
            assert (await refusal(server))[0] == 503
            page = (await server.http.get("/metrics")).text
            assert "quire:websocket_connections_active 2.0" in page
        await until(lambda: server.sessions.running == 0)
        async with client_of(server) as third:
            await third.expect("session.created")
        page = (await server.http.get("/metrics")).text
        assert "vllm:websocket_connections_total 3.0" in page


async def test_a_silent_client_is_sent_away(tmp_path: Path) -> None:
    async with speech_server(tmp_path, realtime_idle_timeout=0.3) as server, client_of(server) as client:
        await client.expect("session.created")
        error = await client.expect("error")
        assert error["error"]["code"] == "session_idle"
        await client.connection.wait_closed()
        assert client.connection.close_code == 1000
        await until(lambda: server.sessions.running == 0)


async def test_a_session_has_a_longest_duration(tmp_path: Path) -> None:
    model = FakeSpeech()
    model.go.clear()
    async with speech_server(tmp_path, model, realtime_session_timeout=1.5) as server, client_of(server) as client:
        created = await client.expect("session.created")
        assert created["session"]["expires_at"] >= created["created"]
        await client.send("input_audio_buffer.append", audio=base64_of(dialogue(2.0)))
        events = await client.until("error")
        assert events[-1]["error"]["code"] == "session_expired"
        await client.connection.wait_closed()
        await until(lambda: server.sessions.running == 0)
        assert model.active == 0


async def test_clients_that_go_leave_nothing_behind(tmp_path: Path) -> None:
    """Half of 32 sessions end while somebody speaks."""
    model = FakeSpeech()
    async with speech_server(tmp_path, model) as server, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(session_of(server)) for _ in range(32)]
        model.go.clear()
        audio = np.concatenate([silence(0.5), speech(1.5)])
        await asyncio.gather(*(client.append(audio, seconds=0.5) for client in clients))
        for client in clients:
            await client.expect("input_audio_buffer.speech_started")
        await until(lambda: model.active == 8)  # passes over what is spoken; the others wait for their turn
        for client in clients[::2]:
            client.connection.transport.abort()
        await until(lambda: server.sessions.running == 16)
        model.go.set()
        for client in clients[1::2]:
            await client.append(silence(1.0))
            assert (await client.until(COMPLETED))[-1]["transcript"] == "w1 w2 w3"
        await until(lambda: model.active == 0)
        passes = len(model.heard)
        assert len(asyncio.all_tasks()) < 16 * 8
        await asyncio.gather(*(client.connection.close() for client in clients[1::2]))
        await until(lambda: server.sessions.running == 0)
        assert len(model.heard) == passes
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("utterance")]


async def test_a_client_that_does_not_read_is_not_read(tmp_path: Path) -> None:
    """Its events wait in its own system, and after the write timeout it is disconnected."""
    async with speech_server(tmp_path, write_timeout=1.0) as server, client_of(server) as client:
        await client.expect("session.created")
        client.connection.transport.pause_reading()
        bad = json.dumps({"type": "x" * 5000})

        async def send_for_ever() -> None:
            while True:
                await client.connection.send(bad)

        with contextlib.suppress(Exception):
            await asyncio.wait_for(send_for_ever(), 20)
        await until(lambda: server.sessions.running == 0)


async def test_a_server_that_shuts_down_finishes_what_was_said(tmp_path: Path) -> None:
    model = FakeSpeech()
    async with speech_server(tmp_path, model) as server, session_of(server) as client:
        await client.append(np.concatenate([silence(0.5), speech(1.5)]))
        await client.send("nonsense")
        await client.until("error")  # so all audio has been heard
        server.state.draining = True
        server.sessions.drain()
        events = await client.until(COMPLETED)
        assert events[-1]["transcript"] == "w1 w2 w3"
        await client.connection.wait_closed()
        assert client.connection.close_code == 1012
        assert server.sessions.running == 0
        assert (await refusal(server))[0] == 503
