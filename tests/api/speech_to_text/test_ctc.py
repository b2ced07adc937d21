"""CTC models behind the endpoints: every format, streams, what cannot be asked of them, long and hostile audio."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.audio import encode, tone, wav
from tests.support.ctc_speech import CTCCore, write_characters
from tests.support.realtime import pcm, session_of
from tests.support.server import Server, running_server, until
from tests.support.speech import added, spoken

PATH = "/v1/audio/transcriptions"
A, B = 300.0, 600.0
AUDIO = wav(spoken((A, 1.0), (B, 1.0))[:, None])
LONG = encode(spoken(*((hertz, 4.0) for hertz in (A, B) * 8))[:, None], "flac")
TIMES: dict[str, Any] = {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]}


def serve(folder: Path, core: CTCCore, **options: Any) -> Any:
    return running_server(folder, core, write=write_characters, **options)


async def send(server: Server, path: str = PATH, file: Any = AUDIO, **fields: Any) -> httpx.Response:
    return await server.http.post(path, files={"file": ("speech.wav", file)}, data=fields)


async def test_every_format(tmp_path: Path) -> None:
    async with serve(tmp_path, CTCCore()) as server:
        body = (await send(server)).json()
        assert body == {
            "text": "ALPHA BRAVO",
            "usage": {
                "type": "duration",
                "seconds": 4,
                "input_tokens": 160,
                "output_tokens": 12,
                "total_tokens": 172,
                "input_token_details": {"audio_tokens": 160, "text_tokens": 0},
            },
        }
        assert (await send(server, response_format="text")).text == "ALPHA BRAVO\n"
        assert (await send(server, response_format="srt")).text == (
            "1\n00:00:00,400 --> 00:00:00,760\nALPHA\n\n2\n00:00:01,800 --> 00:00:02,160\nBRAVO\n\n"
        )
        assert (await send(server, response_format="vtt")).text.startswith("WEBVTT\n\n00:00:00.400 --> 00:00:00.760\n")
        body = (await send(server, **TIMES)).json()
        assert (body["text"], body["language"], body["duration"]) == ("ALPHA BRAVO", "", 3.2)
        assert body["words"] == [
            {"word": "ALPHA", "start": 0.4, "end": 0.76},
            {"word": "BRAVO", "start": 1.8, "end": 2.16},
        ]
        first = body["segments"][0]
        assert (first["text"], first["start"], first["end"], first["seek"]) == ("ALPHA", 0.4, 0.76, 0)
        assert (first["avg_logprob"], first["no_speech_prob"], first["temperature"]) == (-0.25, 0.0, 0.0)
        assert len(first["tokens"]) == 5


async def test_log_probabilities_and_a_limit_of_tokens(tmp_path: Path) -> None:
    async with serve(tmp_path, CTCCore()) as server:
        fields: dict[str, Any] = {"include[]": ["logprobs"], "max_completion_tokens": "7"}
        body = (await send(server, **fields)).json()
        assert body["text"] == "ALPHA B"
        assert body["logprobs"][5] == {"token": " ", "logprob": -0.25, "bytes": [32]}
        assert bytes(value for entry in body["logprobs"] for value in entry["bytes"]) == b"ALPHA B"


async def test_long_audio_keeps_its_times_and_gives_every_word_once(tmp_path: Path) -> None:
    core = CTCCore()
    async with serve(tmp_path, core) as server:
        body = (await send(server, file=LONG, **TIMES)).json()
        assert body["text"].split() == ["ALPHA", "BRAVO"] * 8
        assert [word["start"] for word in body["words"]] == pytest.approx([0.4 + 4.4 * i for i in range(16)], abs=0.03)
        assert all(segment["end"] <= two["start"] for segment, two in pairwise(body["segments"]))
        requests = added(core)
        assert len(requests) == 3
        assert len({request.flow for request in requests}) == 1
        assert sum(request.audio_items[0].features.shape[1] for request in requests) == round(body["duration"] * 16_000)
        voice = (await send(server, file=wav(tone(3.0, level=0.0)), chunking_strategy="auto")).json()
        assert voice["text"] == ""


async def test_streams_give_a_piece_for_each_window(tmp_path: Path) -> None:
    async with serve(tmp_path, CTCCore()) as server:
        response = await send(server, file=LONG, stream="true")
        events = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]
        assert [event["type"] for event in events] == ["transcript.text.delta"] * 3 + ["transcript.text.done"]
        assert "".join(event["delta"] for event in events[:-1]) == events[-1]["text"]
        assert events[-1]["text"].split() == ["ALPHA", "BRAVO"] * 8
        usage = {"stream_include_usage": "true", "stream_continuous_usage_stats": "true"}
        chunks = await send(server, stream="true", stream_format="vllm", **usage)
        assert chunks.text.endswith("data: [DONE]\n\n")
        first = json.loads(chunks.text.split("\n\n")[0].removeprefix("data: "))
        assert first["choices"][0]["delta"]["content"] == "ALPHA BRAVO"
        assert first["usage"] == {"prompt_tokens": 160, "completion_tokens": 12, "total_tokens": 172}


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"language": "en"}, "language", "transcribes one language only"),
        ({"languages[]": ["en", "de"]}, "languages", "transcribes one language only"),
        ({"prompt": "Earlier."}, "prompt", "takes no text prompt"),
        ({"hotwords": "Quire"}, "hotwords", "takes no text prompt"),
        ({"keywords[]": ["Quire"]}, "hotwords", "takes no text prompt"),
        ({"temperature": "0.5"}, "temperature", "without sampling"),
        ({"top_p": "0.5"}, "top_p", "without sampling"),
        ({"repetition_penalty": "1.5"}, "repetition_penalty", "without sampling"),
        ({"use_beam_search": "true", "n": "4"}, "use_beam_search", "without sampling"),
    ],
)
async def test_what_the_model_cannot_follow_is_refused(
    tmp_path: Path, fields: dict[str, Any], param: str, reason: str
) -> None:
    core = CTCCore()
    async with serve(tmp_path, core) as server:
        response = await send(server, **fields)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert f"`{param}`" in error["message"]
        assert reason in error["message"]
        assert added(core) == []
        neutral = {"temperature": "0", "top_p": "1", "prompt": "", "seed": "3", "frequency_penalty": "0"}
        assert (await send(server, **neutral)).status_code == 200


async def test_translations_are_refused(tmp_path: Path) -> None:
    core = CTCCore()
    async with serve(tmp_path, core) as server:
        response = await send(server, "/v1/audio/translations")
        assert response.status_code == 400
        assert "does not support translation" in response.json()["error"]["message"]
        assert added(core) == []
        assert (await send(server, file=b"no audio at all")).status_code == 400


@pytest.mark.parametrize("length", [1, 100, 319])
async def test_very_short_audio_has_no_text(tmp_path: Path, length: int) -> None:
    async with serve(tmp_path, CTCCore()) as server:
        response = await send(server, file=wav(np.full((length, 1), 0.5, np.float32)))
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["input_tokens"] == 1


async def test_a_disconnect_aborts_everything(tmp_path: Path) -> None:
    core = CTCCore()
    core.hold.set()
    async with serve(tmp_path, core) as server:
        client = server.state.models[0].client
        task = asyncio.create_task(send(server, file=LONG))
        await until(lambda: len(core.active) > 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: client.slots_in_use == 0 and client.open_streams == 0)
        core.hold.clear()
        await until(lambda: not core.active)
        assert (await send(server, timeout="600")).status_code == 200
        core.hold.set()
        assert (await send(server, timeout="0.2")).status_code == 408


async def test_realtime_sessions(tmp_path: Path) -> None:
    async with serve(tmp_path, CTCCore()) as server, session_of(server, turn_detection=None) as client:
        await client.append(pcm(spoken((A, 0.8), (B, 0.8))))
        await client.send("input_audio_buffer.commit")
        events = await client.until("conversation.item.done")
        assert events[-2]["transcript"] == "ALPHA BRAVO"
        await client.send("session.update", session={"audio": {"input": {"transcription": {"language": "en"}}}})
        assert "`language` is not supported" in (await client.expect("error"))["error"]["message"]
