"""Sessions in vLLM's dialect, with a plain client."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quire.api.http.errors import InvalidRequest
from tests.support.realtime import FakeSpeech, base64_of, client_of, dialogue, silence, speech, speech_server


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
