"""Sessions in vLLM's dialect, with a plain client."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from quire.protocol.errors import InvalidRequest
from tests.support.realtime import (
    Client,
    FakeSpeech,
    base64_of,
    client_of,
    dialogue,
    silence,
    speech,
    speech_server,
    update,
)

EVENT_SIZE = 4 << 20  # characters
CODES = {"invalid_json", "invalid_audio", "model_not_validated", "model_not_found", "unknown_event", "invalid_event"}
APPEND = json.dumps({"type": "input_audio_buffer.append", "audio": base64_of(silence(0.02))})
# Refused at any time, with these codes.
MALFORMED: list[tuple[str | bytes, str]] = [
    ("", "invalid_json"),
    ("{", "invalid_json"),
    ("[" * 100_000, "invalid_event"),
    ('{"type":NaN}', "invalid_json"),
    ("null", "invalid_event"),
    ("[]", "invalid_event"),
    ("{}", "invalid_event"),
    ('{"type":5}', "invalid_event"),
    (b"\x00\xff", "invalid_event"),
    ('{"type":"session.update"}', "invalid_event"),
    ('{"type":"session.update","model":null}', "invalid_event"),
    ('{"type":"session.update","model":""}', "invalid_event"),
    ('{"type":"session.update","model":["fake"]}', "invalid_event"),
    ('{"type":"session.update","model":"nobody"}', "model_not_found"),
    (update({"turn_detection": None}), "invalid_event"),
    ('{"type":"transcription_session.update","session":{}}', "unknown_event"),
    ('{"type":"input_audio_buffer.append"}', "invalid_event"),
    ('{"type":"input_audio_buffer.append","audio":5}', "invalid_event"),
    ('{"type":"input_audio_buffer.commit","final":"yes"}', "invalid_event"),
    ('{"type":"response.create"}', "unknown_event"),
    ('{"type":"transcription.done"}', "unknown_event"),
    (json.dumps({"type": "input_audio_buffer.append", "audio": "A" * EVENT_SIZE}), "invalid_event"),
]
# Before a model was named.
EARLY = [
    (APPEND, "model_not_validated"),
    ('{"type":"input_audio_buffer.commit"}', "model_not_validated"),
    ('{"type":"input_audio_buffer.commit","final":false}', "model_not_validated"),
    ('{"type":"input_audio_buffer.commit","final":true}', "model_not_validated"),
]
NO_AUDIO = [
    ('{"type":"input_audio_buffer.append","audio":"A"}', "invalid_audio"),
    ('{"type":"input_audio_buffer.append","audio":"AA=A"}', "invalid_audio"),
    ('{"type":"input_audio_buffer.append","audio":"\u00e4!"}', "invalid_audio"),
]


async def test_a_generation_is_the_text_of_all_its_utterances(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, client_of(server, "") as client:
        created = await client.expect("session.created")
        assert created["id"].startswith("sess-")
        assert isinstance(created["created"], int)
        await client.send("session.update", model="fake")
        for lengths, text in (((2.0, 1.2), "w1 w2 w3 w4 w1 w2 w3"), ((1.0,), "w1 w2")):
            await client.send("input_audio_buffer.commit", final=False)
            audio = dialogue(*lengths).tobytes()
            for start in range(0, len(audio), 4095):  # an odd size: samples are divided
                await client.send("input_audio_buffer.append", audio=base64_of(audio[start : start + 4095]))
            await client.send("input_audio_buffer.commit", final=False)  # is ignored while a generation runs
            await client.send("input_audio_buffer.commit", final=True)
            events = await client.until("transcription.done")
            assert {e["type"] for e in events[:-1]} == {"transcription.delta"}
            done = events[-1]
            assert done["text"] == text
            assert "".join(e["delta"] for e in events[:-1]) == text
            usage = done["usage"]
            assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"] > 0


async def test_the_end_of_the_audio_ends_the_last_utterance(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, client_of(server, "") as client:
        await client.expect("session.created")
        await client.send("session.update", model="fake")
        await client.send("input_audio_buffer.commit", final=False)
        await client.append(np.concatenate([silence(0.5), speech(1.3)]))
        await client.send("input_audio_buffer.commit", final=True)
        assert (await client.until("transcription.done"))[-1]["text"] == "w1 w2 w3"


async def test_silence_has_no_text(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, client_of(server, "") as client:
        await client.expect("session.created")
        await client.send("session.update", model="fake")
        await client.append(silence(2.0))
        await client.send("input_audio_buffer.commit", final=True)
        assert (await client.expect("transcription.done"))["text"] == ""


async def test_errors_are_strings_with_vllms_codes(tmp_path: Path) -> None:
    model = FakeSpeech()
    async with speech_server(tmp_path, model) as server, client_of(server, "") as client:
        await client.expect("session.created")

        async def refused(code: str) -> str:
            event = await client.expect("error")
            assert event["code"] == code, event
            assert isinstance(event["error"], str)
            return event["error"]

        await client.connection.send("{")
        await refused("invalid_json")
        await client.send("input_audio_buffer.append", audio="AAAA")
        await refused("model_not_validated")
        await client.send("session.update", model="nobody")
        assert "nobody" in await refused("model_not_found")
        await client.send("session.update")
        await refused("invalid_event")
        await client.send("session.update", model="fake")
        await client.send("nonsense")
        await refused("unknown_event")
        await client.send("input_audio_buffer.append", audio="?")
        await refused("invalid_audio")
        model.failure = InvalidRequest("too strange")
        await client.append(dialogue(1.0))
        await client.send("input_audio_buffer.commit", final=True)
        assert await refused("processing_error") == "too strange"
        assert (await client.expect("transcription.done"))["text"] == ""


async def test_the_first_event_shows_the_dialect(tmp_path: Path) -> None:
    """Whatever the URL says."""
    async with speech_server(tmp_path) as server:
        async with client_of(server, "?model=fake") as client:
            await client.expect("session.created")
            await client.send("session.update", model="fake")
            await client.append(dialogue(1.0))
            await client.send("input_audio_buffer.commit", final=True)
            assert (await client.until("transcription.done"))[-1]["text"] == "w1 w2"
        async with client_of(server, "") as client:
            await client.expect("session.created")
            await client.update(turn_detection=None)
            await client.append(silence(0.5), rate=24000)
            await client.send("input_audio_buffer.commit")
            await client.expect("input_audio_buffer.committed")


async def test_a_server_that_shuts_down_ends_the_generation(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, client_of(server, "") as client, client_of(server, "") as idle:
        for connection in (client, idle):
            await connection.expect("session.created")
            await connection.send("session.update", model="fake")
        await client.append(np.concatenate([dialogue(1.0), speech(1.3)]))
        for connection in (client, idle):
            await connection.send("nonsense")
            await connection.until("error")  # so all audio has been heard
        server.sessions.drain()
        assert (await client.until("transcription.done"))[-1]["text"] == "w1 w2 w1 w2 w3"
        for connection in (client, idle):
            await connection.connection.wait_closed()
            assert connection.connection.close_code == 1012


async def check_alive(client: Client) -> None:
    """A generation has the text of its audio, and of nothing else."""
    await client.send("input_audio_buffer.commit", final=False)
    await client.append(dialogue(1.0))
    await client.send("input_audio_buffer.commit", final=True)
    events = await client.until("transcription.done")
    assert events[-1]["text"] == "w1 w2"
    assert {event["type"] for event in events[:-1]} == {"transcription.delta"}


async def refuse(client: Client, event: str | bytes, codes: set[str]) -> None:
    """The event is answered with one error."""
    await client.connection.send(event)
    error = await client.expect("error")
    assert error["code"] in codes, (event[:100], error)
    assert isinstance(error["error"], str)
    assert error["error"]


async def test_five_hundred_bad_events_do_not_end_a_session(tmp_path: Path) -> None:
    """Malformed ones, too large ones, and ones out of order: half of them before a model was named."""
    generator = random.Random(36)

    def drawn(known: list[Any], count: int) -> list[tuple[str | bytes, set[str]]]:
        events = [(event, {code}) for event, code in known]
        while len(events) < count:
            cut = generator.randrange(1, len(APPEND) - 1)
            truncated = (generator.choice((APPEND[:cut], APPEND[cut:], APPEND.replace("audio", "sound"))), CODES)
            event, code = generator.choice(known)
            events.append(generator.choice((truncated, (event, {code}))))
        generator.shuffle(events)
        return events

    async with (
        speech_server(tmp_path, max_realtime_event_size=EVENT_SIZE) as server,
        client_of(server, "") as client,
    ):
        await client.expect("session.created")
        await refuse(client, '{"type":"input_audio_buffer.commit","final":true}', {"model_not_validated"})
        for event, codes in drawn([*MALFORMED, *EARLY], 249):
            await refuse(client, event, codes)
        await client.send("session.update", model="fake")
        await check_alive(client)
        for number, (event, codes) in enumerate(drawn([*MALFORMED, *NO_AUDIO], 250)):
            await refuse(client, event, codes)
            if number % 100 == 50:
                await check_alive(client)
        await check_alive(client)
