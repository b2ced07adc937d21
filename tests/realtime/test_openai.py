"""Sessions in OpenAI's dialects, over a real connection."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soxr
from openai import AsyncOpenAI

from quire.engine.client.errors import EngineDead, EngineOverloaded
from quire.protocol.errors import InvalidRequest
from quire.realtime.settings import SessionSettings
from tests.support.realtime import (
    RATE,
    FakeSpeech,
    base64_of,
    client_of,
    dialogue,
    session_of,
    silence,
    speech,
    speech_server,
    words,
)
from tests.support.server import until

DELTA = "conversation.item.input_audio_transcription.delta"
COMPLETED = "conversation.item.input_audio_transcription.completed"
FAILED = "conversation.item.input_audio_transcription.failed"
DONE = "conversation.item.done"


async def test_a_dialogue_comes_back_utterance_by_utterance(tmp_path: Path) -> None:
    model = FakeSpeech()
    async with speech_server(tmp_path, model) as server, session_of(server) as client:
        await client.append(dialogue(2.0, 1.2, 3.1))
        events = [event for _ in range(3) for event in await client.until(DONE)]
        items = [e["item_id"] for e in events if e["type"] == "input_audio_buffer.speech_started"]
        assert [e["item_id"] for e in events if e["type"] == COMPLETED] == items
        for index, (start, length) in enumerate(((1.0, 2.0), (4.0, 1.2), (6.2, 3.1))):
            item_events = [e for e in events if items[index] in (e.get("item_id"), e.get("item", {}).get("id"))]
            assert [e["type"] for e in item_events if e["type"] != DELTA] == [
                "input_audio_buffer.speech_started",
                "input_audio_buffer.speech_stopped",
                "input_audio_buffer.committed",
                "conversation.item.added",
                COMPLETED,
                DONE,
            ]
            started, stopped, committed, _, completed, done = (e for e in item_events if e["type"] != DELTA)
            assert started["audio_start_ms"] == pytest.approx(1000 * start - 300, abs=150)
            assert stopped["audio_end_ms"] == pytest.approx(1000 * (start + length), abs=300)
            assert committed["previous_item_id"] == (items[index - 1] if index else None)
            text = completed["transcript"]
            assert text == words((stopped["audio_end_ms"] - started["audio_start_ms"]) // 500)
            assert "".join(e["delta"] for e in item_events if e["type"] == DELTA) == text
            assert completed["usage"]["type"] == "tokens"
            assert done["item"]["content"][0]["transcript"] == text
            assert done["previous_item_id"] == committed["previous_item_id"]


async def test_text_appears_while_one_speaks(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, session_of(server) as client:
        await client.append(silence(0.5))
        await client.append(speech(1.5))
        await client.expect("input_audio_buffer.speech_started")
        first = await client.expect(DELTA)
        assert first["delta"] == "w1"
        await client.append(speech(1.0))
        assert (await client.expect(DELTA))["delta"].startswith(" w2")
        await client.append(silence(1.0))
        events = await client.until(COMPLETED)
        assert events[-1]["transcript"].startswith("w1 w2 w3 ")


async def test_without_interim_passes_an_utterance_is_heard_once(tmp_path: Path) -> None:
    model = FakeSpeech()
    async with speech_server(tmp_path, model, realtime_interim_interval=0) as server, session_of(server) as client:
        await client.append(dialogue(3.0))
        await client.until(COMPLETED)
        assert len(model.heard) == 1


async def test_the_client_may_say_where_utterances_end(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, session_of(server, turn_detection=None) as client:
        for length in (1.0, 2.0):
            await client.append(silence(length))
            await client.send("input_audio_buffer.commit")
            events = await client.until(DONE)
            assert [e["type"] for e in events[:2]] == ["input_audio_buffer.committed", "conversation.item.added"]
            assert events[-2]["transcript"] == words(int(length * 2))
            assert "".join(e["delta"] for e in events if e["type"] == DELTA) == words(int(length * 2))


async def test_a_commit_ends_the_utterance_that_is_spoken(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, session_of(server) as client:
        await client.append(np.concatenate([silence(0.5), speech(1.5)]))
        await client.send("input_audio_buffer.commit")
        events = await client.until(DONE)
        assert events[-2]["transcript"] == "w1 w2 w3"
        await client.append(dialogue(1.2))
        stopped = [e for e in await client.until(DONE) if e["type"] == "input_audio_buffer.speech_stopped"]
        assert stopped[0]["audio_end_ms"] == pytest.approx(2000 + 1000 + 1200, abs=300)


async def test_cleared_audio_is_not_transcribed(tmp_path: Path) -> None:
    model = FakeSpeech()
    async with speech_server(tmp_path, model) as server:
        async with session_of(server) as client:
            await client.append(np.concatenate([silence(0.5), speech(1.0)]))
            await client.expect("input_audio_buffer.speech_started")
            await client.send("input_audio_buffer.clear")
            assert (await client.until("input_audio_buffer.cleared"))[-1]["type"] == "input_audio_buffer.cleared"
            await client.append(dialogue(1.2))
            events = await client.until(DONE)
            assert [e["type"] for e in events].count(COMPLETED) == 1
        async with session_of(server, turn_detection=None) as client:
            await client.append(silence(3.0))
            await client.send("input_audio_buffer.clear")
            await client.expect("input_audio_buffer.cleared")
            await client.append(silence(0.5))
            await client.send("input_audio_buffer.commit")
            assert (await client.until(COMPLETED))[-1]["transcript"] == "w1"


async def test_speech_without_a_pause_is_cut(tmp_path: Path) -> None:
    async with speech_server(tmp_path, realtime_interim_interval=0) as server, session_of(server) as client:
        await client.append(np.concatenate([silence(0.5), speech(50.0), silence(1.0)]), seconds=1.0)
        first, second = await client.until(DONE), await client.until(DONE)
        stops = [e["audio_end_ms"] for e in (*first, *second) if e["type"] == "input_audio_buffer.speech_stopped"]
        starts = [e["audio_start_ms"] for e in (*first, *second) if e["type"] == "input_audio_buffer.speech_started"]
        assert 25_000 <= stops[0] - starts[0] <= 30_000
        assert starts[1] == stops[0]
        assert stops[1] == pytest.approx(50_500, abs=300)


@pytest.mark.parametrize("rate", [16000, 24000])
@pytest.mark.parametrize("chunk", [0.013, 0.1, 5.0])
async def test_audio_may_come_at_two_rates_and_in_any_pieces(tmp_path: Path, rate: int, chunk: float) -> None:
    audio = dialogue(2.0)
    if rate != RATE:
        audio = (soxr.resample(audio.astype(np.float32), RATE, rate)).astype(np.int16)
    model = FakeSpeech()
    async with (
        speech_server(tmp_path, model, realtime_interim_interval=0) as server,
        session_of(server, rate=rate) as client,
    ):
        await client.append(audio, chunk, rate)
        await client.until(COMPLETED)
        assert model.heard[0][0] == pytest.approx(2.0 + 0.3 + 0.1, abs=0.2)


@pytest.mark.parametrize("kind", ["pcmu", "pcma"])
async def test_telephone_audio_is_understood(tmp_path: Path, kind: str) -> None:
    samples = np.round(soxr.resample(dialogue(2.0).astype(np.float32), RATE, 8000)).astype(np.int16)
    encoded = {"pcmu": mu_law, "pcma": a_law}[kind](samples)
    model = FakeSpeech()
    async with speech_server(tmp_path, model, realtime_interim_interval=0) as server, client_of(server) as client:
        await client.expect("session.created")
        await client.update(format={"type": f"audio/{kind}"})
        await client.send("input_audio_buffer.append", audio=base64_of(encoded))
        await client.until(COMPLETED)
        assert model.heard[0][0] == pytest.approx(2.4, abs=0.2)


def mu_law(samples: np.ndarray) -> bytes:
    """G.711, by its definition: sign, segment and step of the magnitude with a bias."""
    magnitude = np.minimum(np.abs(samples.astype(np.int32)), 32635) + 132
    exponent = np.floor(np.log2(magnitude)).astype(np.int32) - 7
    mantissa = magnitude >> (exponent + 3) & 15
    codes = ~((samples < 0) * 128 | exponent << 4 | mantissa) & 255
    return bytes(codes.astype(np.uint8))


def a_law(samples: np.ndarray) -> bytes:
    """G.711 A-law, likewise."""
    magnitude = np.minimum(np.abs(samples.astype(np.int32)), 32767)
    exponent = np.maximum(np.floor(np.log2(np.maximum(magnitude, 1))).astype(np.int32) - 7, 0)
    mantissa = magnitude >> np.where(exponent == 0, 4, exponent + 3) & 15
    codes = ((samples >= 0) * 128 | exponent << 4 | mantissa) ^ 0x55
    return bytes(codes.astype(np.uint8))


async def test_settings_reach_the_model(tmp_path: Path) -> None:
    model = FakeSpeech()
    async with speech_server(tmp_path, model) as server, session_of(server, turn_detection=None) as client:
        await client.update(
            transcription={"model": "alias", "language": "de", "prompt": "Names:", "keywords": ["Ada", "Alan"]},
            noise_reduction={"type": "near_field"},
        )
        await client.append(silence(0.5))
        await client.send("input_audio_buffer.commit")
        completed = (await client.until(COMPLETED))[-1]
        assert completed["transcript"] == "de1"
        assert completed["languages"] == [{"code": "de"}]
        settings = model.heard[0][1]
        assert (settings.language, settings.prompt, settings.model) == ("de", "Names:\nAda, Alan", "alias")


async def test_settings_of_speech_to_speech_sessions_have_no_effect(tmp_path: Path) -> None:
    """Also, a client may send a session back as it has got it."""
    async with speech_server(tmp_path) as server, client_of(server) as client:
        created = (await client.expect("session.created"))["session"]
        await client.send("session.update", session=created)
        assert (await client.expect("session.updated"))["session"] == created
        spoken = {"type": "realtime", "instructions": "Be kind.", "tools": [], "audio": {"output": {"voice": "alloy"}}}
        await client.send("session.update", session=spoken)
        assert (await client.expect("session.updated"))["session"] == created
    async with (
        speech_server(tmp_path) as server,
        client_of(server, "?intent=transcription", additional_headers={"OpenAI-Beta": "realtime=v1"}) as client,
    ):
        created = (await client.expect("transcription_session.created"))["session"]
        await client.send("transcription_session.update", session=created)
        assert (await client.expect("transcription_session.updated"))["session"] == created


async def test_what_is_below_the_noise_floor_is_not_speech(tmp_path: Path) -> None:
    quiet = (dialogue(1.5) / 100).astype(np.int16)
    async with speech_server(tmp_path) as server:
        async with session_of(server) as client:
            await client.append(quiet)
            await client.until(COMPLETED)
        async with session_of(server, turn_detection={"type": "server_vad", "noise_floor": -45}) as client:
            await client.append(quiet)
            await client.send("input_audio_buffer.commit")
            assert (await client.expect("error"))["error"]["code"] == "input_audio_buffer_commit_empty"


async def test_an_utterance_that_fails_does_not_end_the_session(tmp_path: Path) -> None:
    model = FakeSpeech()
    async with speech_server(tmp_path, model) as server, session_of(server, turn_detection=None) as client:
        for failure, message in (
            (InvalidRequest("too strange"), "too strange"),
            (EngineDead("it has died"), "it has died"),
            (ZeroDivisionError("a secret"), "Internal server error"),
        ):
            model.failure = failure
            await client.append(silence(0.5))
            await client.send("input_audio_buffer.commit")
            event = (await client.until(FAILED))[-1]
            assert event["error"]["message"] == message
            done = await client.expect(DONE)
            assert (done["item"]["id"], done["item"]["status"]) == (event["item_id"], "incomplete")
        model.failure = None
        await client.append(silence(0.5))
        await client.send("input_audio_buffer.commit")
        assert (await client.until(COMPLETED))[-1]["transcript"] == "w1"


class BrokenSpeech(FakeSpeech):
    """Fail in a way that nobody expects, once a language is set."""

    def check(self, settings: SessionSettings) -> None:
        if settings.language is not None:
            raise ZeroDivisionError("a secret")


async def test_a_failure_of_the_server_ends_the_session_with_its_type(tmp_path: Path) -> None:
    async with speech_server(tmp_path, BrokenSpeech()) as server, session_of(server) as client:
        session = {"type": "transcription", "audio": {"input": {"transcription": {"language": "de"}}}}
        await client.send("session.update", session=session)
        error = (await client.expect("error"))["error"]
        assert (error["type"], error["message"]) == ("server_error", "Internal server error")
        await client.connection.wait_closed()
        assert client.connection.close_code == 1011


async def test_the_model_of_a_session_is_that_of_its_transcription_unless_that_has_one(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, client_of(server) as client:
        await client.expect("session.created")
        session = {"audio": {"input": {"transcription": {"model": "fake"}}}}
        for kind, audio, model in (
            ("transcription", {}, "alias"),
            ("realtime", {}, "alias"),
            ("realtime", session, "fake"),
        ):
            await client.send("session.update", session={"type": kind, "model": "alias", **audio})
            updated = (await client.expect("session.updated"))["session"]
            assert updated["audio"]["input"]["transcription"]["model"] == model
        await client.send("session.update", session={"type": "transcription", "model": "nobody"})
        assert (await client.expect("error"))["error"]["code"] == "model_not_found"


async def test_a_full_queue_is_tried_again(tmp_path: Path) -> None:
    model = FakeSpeech(failure=EngineOverloaded("full", 0))
    async with speech_server(tmp_path, model) as server, session_of(server, turn_detection=None) as client:
        await client.append(silence(0.5))
        await client.send("input_audio_buffer.commit")
        await client.until(FAILED)
        assert len(model.heard) == 5


async def test_a_full_queue_only_delays_the_text_of_what_is_being_said(tmp_path: Path) -> None:
    model = FakeSpeech(failure=EngineOverloaded("full", 0))
    async with speech_server(tmp_path, model) as server, session_of(server) as client:
        await client.append(np.concatenate([silence(0.5), speech(1.0)]))
        await until(lambda: model.heard)
        model.failure = None
        await client.append(speech(2.0))
        assert (await client.until(DELTA))[-1]["delta"].startswith("w1")
        assert "input_audio_buffer.speech_stopped" not in [e["type"] for e in await client.until(DELTA)]


async def test_the_beta_has_flat_settings_and_older_names(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        headers = {"OpenAI-Beta": "realtime=v1"}
        async with client_of(server, "?intent=transcription", additional_headers=headers) as client:
            created = await client.expect("transcription_session.created")
            assert created["session"]["input_audio_format"] == "pcm16"
            settings = {
                "input_audio_format": "g711_ulaw",
                "input_audio_transcription": {"model": "fake", "language": "de"},
                "turn_detection": None,
            }
            await client.send("transcription_session.update", session=settings)
            updated = await client.expect("transcription_session.updated")
            assert {name: updated["session"][name] for name in settings if name != "input_audio_transcription"} == {
                "input_audio_format": "g711_ulaw",
                "turn_detection": None,
            }
            assert updated["session"]["input_audio_transcription"]["language"] == "de"
            await client.send("input_audio_buffer.append", audio=base64_of(b"\xff" * 8000))
            await client.send("input_audio_buffer.commit")
            events = await client.until(COMPLETED)
            assert events[1]["type"] == "conversation.item.created"
            assert events[-1]["transcript"] == "de1 de2"
        async with client_of(server, "", additional_headers=headers) as client:
            await client.expect("session.created")
            await client.send("session.update", session={"turn_detection": None})
            assert (await client.expect("session.updated"))["session"]["turn_detection"] is None


async def test_the_official_client(tmp_path: Path) -> None:
    async with (
        speech_server(tmp_path) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as openai,
        openai.realtime.connect(model="fake") as connection,
    ):
        await connection.session.update(
            session={
                "type": "transcription",
                "audio": {
                    "input": {
                        "format": {"type": "audio/pcm", "rate": 24000},
                        "transcription": {"model": "fake"},
                        "turn_detection": {"type": "server_vad", "silence_duration_ms": 400},
                    }
                },
            }
        )
        audio = soxr.resample(dialogue(1.5, 2.0).astype(np.float32), RATE, 24000).astype(np.int16)
        for start in range(0, len(audio), 2400):
            await connection.input_audio_buffer.append(audio=base64_of(audio[start : start + 2400]))
        texts: list[str] = []
        kinds: list[str] = []
        async for event in connection:
            kinds.append(event.type)
            if event.type == "conversation.item.input_audio_transcription.completed":
                texts.append(event.transcript)
                assert event.usage.type == "tokens"
                if len(texts) == 2:
                    break
        assert texts == ["w1 w2 w3", "w1 w2 w3 w4"]
        assert kinds[:3] == ["session.created", "session.updated", "input_audio_buffer.speech_started"]
