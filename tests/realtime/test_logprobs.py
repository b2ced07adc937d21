"""Log-probabilities of transcripts, which sessions include if they are asked to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

from quire.realtime.transcript import Transcript, Usage, token_starts
from quire.speech.types import TokenLogprob
from tests.support.realtime import Client, base64_of, client_of, session_of, silence, speech, speech_server
from tests.support.speech import SpeechCore, spoken
from tests.support.speech import speech_server as tone_server

LOGPROBS = "item.input_audio_transcription.logprobs"
DELTA = "conversation.item.input_audio_transcription.delta"
COMPLETED = "conversation.item.input_audio_transcription.completed"


async def include(client: Client, value: Any) -> Any:
    """Set what the session includes; returns what it says that it includes."""
    await client.send("session.update", session={"type": "transcription", "include": value})
    return (await client.expect("session.updated"))["session"]["include"]


async def committed(client: Client, seconds: float = 1.5) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The deltas and the completed event of an utterance."""
    await client.append(silence(seconds))
    await client.send("input_audio_buffer.commit")
    events = await client.until(COMPLETED)
    await client.expect("conversation.item.done")
    return [event for event in events if event["type"] == DELTA], events[-1]


def entries(*pairs: tuple[str, float]) -> list[dict[str, Any]]:
    return [{"token": token, "logprob": logprob, "bytes": list(token.encode())} for token, logprob in pairs]


async def test_a_session_includes_them_while_it_is_asked_to(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, session_of(server, turn_detection=None) as client:
        deltas, completed = await committed(client)
        assert not any("logprobs" in event for event in (*deltas, completed))
        assert await include(client, [LOGPROBS]) == [LOGPROBS]
        await client.update(transcription={"language": "de"})  # what an update omits stays as it is
        deltas, completed = await committed(client)
        assert completed["logprobs"] == entries((" de1", 0.0), (" de2", -0.25), (" de3", -0.5))
        assert [entry for event in deltas for entry in event["logprobs"]] == completed["logprobs"]
        assert await include(client, []) is None
        await include(client, [LOGPROBS])
        assert await include(client, None) is None
        deltas, completed = await committed(client)
        assert not any("logprobs" in event for event in (*deltas, completed))


async def test_nothing_else_can_be_included(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, session_of(server) as client:
        for value in (["reasoning"], [LOGPROBS, "reasoning"], LOGPROBS):
            await client.send("session.update", session={"include": value})
            assert (await client.expect("error"))["error"]["param"] == "session.include"


async def test_interim_text_has_those_of_the_transcription_it_comes_from(tmp_path: Path) -> None:
    """The model gives words of interim transcripts twice the value of the same words in a final one."""
    async with speech_server(tmp_path) as server, session_of(server) as client:
        await include(client, [LOGPROBS])
        await client.append(np.concatenate([silence(0.5), speech(3.0)]))
        early = [(await client.until(DELTA))[-1]]
        await client.append(silence(1.0))
        events = await client.until(COMPLETED)
        stopped = next(i for i, event in enumerate(events) if event["type"] == "input_audio_buffer.speech_stopped")
        early += [event for event in events[:stopped] if event["type"] == DELTA]
        late = [event for event in events[stopped:] if event["type"] == DELTA]
        final = events[-1]["logprobs"]
        words = [entry["token"].strip() for entry in final]
        assert words == events[-1]["transcript"].split()
        told = [entry for event in early for entry in event["logprobs"]]
        assert [entry["token"] for entry in told] == [entry["token"] for entry in final[: len(told)]]
        assert [entry["logprob"] for entry in told] == [2 * entry["logprob"] for entry in final[: len(told)]]
        assert [entry for event in late for entry in event["logprobs"]] == final[len(told) :]
        for event in (*early, *late):
            assert "".join(entry["token"] for entry in event["logprobs"]).strip() == event["delta"].strip()


async def test_they_are_those_of_the_models_tokens(tmp_path: Path) -> None:
    core = SpeechCore(logprob=lambda message, index: -index / 100)
    async with tone_server(tmp_path, core) as server, session_of(server, turn_detection=None) as client:
        await include(client, [LOGPROBS])
        await client.append((spoken((300, 0.6), (600, 0.6)) * 32767).astype(np.int16))
        await client.send("input_audio_buffer.commit")
        events = await client.until(COMPLETED)
        assert bytes(byte for entry in events[-1]["logprobs"] for byte in entry["bytes"]) == b" alpha bravo"
        assert [entry["logprob"] for entry in events[-1]["logprobs"]] == pytest.approx([-i / 100 for i in range(12)])
        deltas = [entry for event in events if event["type"] == DELTA for entry in event["logprobs"]]
        assert deltas == events[-1]["logprobs"]


async def test_the_beta_includes_them_as_well(tmp_path: Path) -> None:
    headers = {"OpenAI-Beta": "realtime=v1"}
    async with (
        speech_server(tmp_path) as server,
        client_of(server, "?intent=transcription", additional_headers=headers) as client,
    ):
        await client.expect("transcription_session.created")
        settings = {"include": [LOGPROBS], "turn_detection": None, "input_audio_format": "g711_ulaw"}
        await client.send("transcription_session.update", session=settings)
        assert (await client.expect("transcription_session.updated"))["session"]["include"] == [LOGPROBS]
        await client.send("input_audio_buffer.append", audio=base64_of(b"\xff" * 8000))
        await client.send("input_audio_buffer.commit")
        assert (await client.until(COMPLETED))[-1]["logprobs"] == entries((" w1", 0.0), (" w2", -0.25))


async def test_the_official_client(tmp_path: Path) -> None:
    async with (
        speech_server(tmp_path) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as openai,
        openai.realtime.connect(model="fake") as connection,
    ):
        session: Any = {"type": "transcription", "audio": {"input": {"turn_detection": None}}, "include": [LOGPROBS]}
        await connection.session.update(session=session)
        await connection.input_audio_buffer.append(audio=base64_of(np.zeros(24_000, np.int16)))
        await connection.input_audio_buffer.commit()
        texts: list[str] = []
        async for event in connection:
            if event.type == "conversation.item.input_audio_transcription.delta":
                texts += [entry.token for entry in event.logprobs or []]
            elif event.type == "conversation.item.input_audio_transcription.completed":
                assert event.logprobs is not None
                assert [entry.token for entry in event.logprobs] == texts == [" w1", " w2"]
                break


def tokens(*contents: bytes) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(content.decode(errors="replace"), 0.0, content) for content in contents)


def test_tokens_begin_where_their_characters_are() -> None:
    assert token_starts(tokens(b" one", b" two", b"!"), "one two!") == [0, 3, 7]
    assert token_starts(tokens(b"one", b".", b"two"), "one. two") == [0, 3, 4]  # a space between windows
    day = "今日は".encode()
    assert token_starts(tokens(day[:2], day[2:4], day[4:]), "今日は") == [0, 0, 1]
    assert token_starts(tokens(b"one ", b"two", b" "), "one two") == [0, 4, 7]


def test_every_token_is_in_one_part_of_a_text() -> None:
    pieces = tokens(b" one", b" t", b"wo", b" three", b" ")
    transcript = Transcript("one two three", Usage(1.0), logprobs=pieces)
    parts = [transcript.logprobs_between(start, end) for start, end in ((0, 3), (3, 7), (7, 13), (13, 13))]
    assert parts == [pieces[:1], pieces[1:3], pieces[3:], ()]
    assert Transcript("one", Usage(1.0)).logprobs_between(0, 3) is None
