"""Events that are refused: an error event each, and the session lives."""

from __future__ import annotations

import gc
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.realtime import Client, base64_of, client_of, session_of, silence, speech_server, update
from tests.support.server import until

TEXTS = [
    "",
    "{",
    "null",
    "[]",
    '"text"',
    "[" * 100_000,
    '{"type":"session.update","session":' + "[" * 50_000 + "]" * 50_000 + "}",
    '{"type":NaN}',
    "{}",
    '{"type":null}',
    '{"type":5}',
    '{"type":"input_audio_buffer.append"}',
    '{"type":"input_audio_buffer.append","audio":null}',
    '{"type":"input_audio_buffer.append","audio":"\\ud800"}',
    '{"type":"input_audio_buffer.append","audio":"A"}',
    '{"type":"input_audio_buffer.append","audio":"AA=A"}',
    '{"type":"input_audio_buffer.append","audio":"AAAA\\n"}',
    '{"type":"input_audio_buffer.append","audio":"äöü!"}',
    '{"type":"input_audio_buffer.commit"}',
    '{"type":"input_audio_buffer.commit","final":"yes"}',
    '{"type":"input_audio_buffer.clear","event_id":5}',
    '{"type":"session.update"}',
    '{"type":"session.update","session":null}',
    '{"type":"session.update","session":[]}',
    '{"type":"session.update","session":{"type":"conversation"}}',
    '{"type":"transcription_session.update","session":{}}',
    '{"type":"response.create"}',
    '{"type":"conversation.item.create","item":{}}',
    '{"type":"nonsense"}',
]
INPUTS: list[tuple[dict[str, Any], str | None]] = [
    ({"format": {"type": "audio/mp3"}}, "session.audio.input.format.type"),
    ({"format": {"type": "audio/pcm", "rate": 44100}}, "session.audio.input.format.rate"),
    ({"turn_detection": {"type": "semantic_vad"}}, "session.audio.input.turn_detection.type"),
    ({"turn_detection": {"type": "server_vad", "threshold": 2}}, "session.audio.input.turn_detection.threshold"),
    (
        {"turn_detection": {"type": "server_vad", "idle_timeout_ms": 6000}},
        "session.audio.input.turn_detection.idle_timeout_ms",
    ),
    ({"turn_detection": {"threshold": 0.5}}, "session.audio.input.turn_detection"),
    ({"turn_detecton": None}, "session.audio.input"),
    ({"transcription": {"lang": "de"}}, "session.audio.input.transcription"),
    ({"transcription": None}, "session.audio.input.transcription"),
    ({"transcription": {"language": "xx"}}, "language"),
    ({"transcription": {"languages": ["de", "en"]}}, "session.audio.input.transcription.languages"),
    ({"transcription": {"model": "nobody"}}, "model"),
    ({"transcription": {"prompt": "a" * 5000}}, "session.audio.input.transcription.prompt"),
    ({"noise_reduction": {"type": "loud"}}, "session.audio.input.noise_reduction.type"),
    ({"noise_reduction": {"type": "far_field", "strength": 1}}, "session.audio.input.noise_reduction.strength"),
]


async def check_alive(client: Client) -> None:
    """The session still transcribes."""
    await client.update(turn_detection=None)
    await client.append(silence(1.0))
    await client.send("input_audio_buffer.commit")
    events = await client.until("conversation.item.input_audio_transcription.completed")
    assert events[-1]["transcript"] == "w1 w2"
    await client.until("conversation.item.done")


async def test_refused_settings_are_named(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, session_of(server) as client:
        for audio_input, param in INPUTS:
            await client.connection.send(update(audio_input))
            error = (await client.expect("error"))["error"]
            assert (error["param"], error["event_id"]) == (param, "mine"), error
            assert error["type"] == "invalid_request_error"
        await check_alive(client)


async def test_five_hundred_bad_events_do_not_end_a_session(tmp_path: Path) -> None:
    generator = random.Random(18)
    size = 4 << 20
    async with speech_server(tmp_path, max_realtime_event_size=size) as server, session_of(server) as client:
        await client.update(turn_detection=None)
        large = json.dumps({"type": "input_audio_buffer.append", "audio": "A" * size})
        good = json.dumps({"type": "input_audio_buffer.append", "event_id": "e", "audio": base64_of(silence(0.02))})
        settings = [update(audio_input) for audio_input, _ in INPUTS]
        bad: list[str | bytes] = [*TEXTS, *settings, b"\x00\xff", large]
        while len(bad) < 500:
            cut = generator.randrange(1, len(good) - 1)
            bad.append(generator.choice((good[:cut], good[cut:], good.replace("audio", "sound"), *TEXTS, *settings)))
        generator.shuffle(bad)
        for number, text in enumerate(bad):
            await client.connection.send(text)
            assert (await client.expect("error"))["error"]["message"], text
            if number % 100 == 50:
                await check_alive(client)
        await check_alive(client)


async def test_an_event_beyond_all_bounds_closes_the_connection(tmp_path: Path) -> None:
    async with speech_server(tmp_path, max_realtime_event_size=1 << 20) as server:
        async with session_of(server) as client:
            await client.connection.send("A" * (3 << 20))
            await client.connection.wait_closed()
            assert client.connection.close_code == 1009
        async with session_of(server) as client:
            await check_alive(client)


async def test_audio_that_is_not_committed_is_bounded(tmp_path: Path) -> None:
    async with (
        speech_server(tmp_path, max_realtime_audio=3) as server,
        session_of(server, turn_detection=None) as client,
    ):
        await client.append(silence(3.0), seconds=1.0)
        await client.append(silence(0.1))
        error = (await client.expect("error"))["error"]
        assert (error["code"], error["param"]) == ("input_audio_buffer_full", "audio")
        await client.send("input_audio_buffer.commit")
        events = await client.until("conversation.item.done")
        assert events[-2]["transcript"] == "w1 w2 w3 w4 w5 w6"
        await check_alive(client)


@pytest.mark.parametrize("milliseconds", [0, 60])
async def test_too_little_audio_is_not_committed(tmp_path: Path, milliseconds: int) -> None:
    async with speech_server(tmp_path) as server, session_of(server, turn_detection=None) as client:
        await client.append(silence(milliseconds / 1000))
        await client.send("input_audio_buffer.commit", event_id="mine")
        error = (await client.expect("error"))["error"]
        assert (error["code"], error["event_id"]) == ("input_audio_buffer_commit_empty", "mine")
        assert f"{milliseconds} ms" in error["message"]


async def test_errors_of_the_beta_are_those_of_openai(tmp_path: Path) -> None:
    async with (
        speech_server(tmp_path) as server,
        client_of(server, "", additional_headers={"OpenAI-Beta": "realtime=v1"}) as client,
    ):
        await client.expect("session.created")
        await client.send("transcription_session.update", session={"input_audio_format": "mp3"})
        assert (await client.expect("error"))["error"]["param"] == "session.input_audio_format"


async def test_audio_of_sessions_takes_memory_that_all_audio_shares(tmp_path: Path) -> None:
    """What does not fit is refused; it is held until its utterance has been transcribed, or the session has ended."""
    async with speech_server(tmp_path, max_media_memory="8MiB") as server:
        memory = server.state.media_memory
        async with session_of(server, turn_detection=None) as client:
            await client.append(silence(20.0), seconds=20.0)
            await client.append(silence(60.0), seconds=60.0)
            error = (await client.expect("error"))["error"]
            assert (error["code"], error["param"]) == ("audio_memory_full", "audio")
            assert "--max-media-memory" in error["message"]
            held = memory.held
            assert held >= 20 * 16_000 * 2
            await client.append(silence(1.0))
            await client.send("input_audio_buffer.commit")
            await client.until("conversation.item.done")
            await client.append(silence(0.1))
            await client.send("input_audio_buffer.clear")
            await client.expect("input_audio_buffer.cleared")
            assert memory.held < held
        await until(lambda: gc.collect() >= 0 and memory.held == 0)
