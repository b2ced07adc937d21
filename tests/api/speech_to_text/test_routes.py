"""Transcriptions and translations over HTTP: formats, fields, errors, admission, disconnects."""

from __future__ import annotations

import asyncio
import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.audio import encode, tone, wav
from tests.support.fake_core import FakeCore
from tests.support.server import Server, until
from tests.support.speech import (
    END,
    TOKEN,
    SpeechCore,
    added,
    at,
    english_only,
    prompts,
    speaks,
    speech_server,
    spoken,
    text,
)

PATH = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
LOGPROBS: dict[str, Any] = {"include[]": ["logprobs"]}
A, B = 300.0, 600.0
AUDIO = wav(spoken((A, 1.0), (B, 1.0))[:, None])
LONG = encode(spoken(*((hertz, 4.0) for hertz in (A, B) * 8))[:, None], "flac")


async def send(server: Server, path: str = PATH, file: Any = AUDIO, **fields: Any) -> httpx.Response:
    return await server.http.post(path, files={"file": ("speech.wav", file)}, data=fields)


def message(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


async def test_json_has_the_text_seconds_and_tokens(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        response = await send(server)
        assert response.json() == {
            "text": "alpha bravo",
            "usage": {
                "type": "duration",
                "seconds": 4,
                "input_tokens": 164,
                "output_tokens": 13,
                "total_tokens": 177,
                "input_token_details": {"audio_tokens": 160, "text_tokens": 4},
            },
            "languages": [{"code": "en"}],
        }


async def test_text_and_subtitles_are_plain(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        response = await send(server, response_format="text")
        assert (response.text, response.headers["content-type"]) == ("alpha bravo\n", "text/plain; charset=utf-8")
        response = await send(server, response_format="srt")
        assert response.headers["content-type"] == "text/plain; charset=utf-8"
        blocks = response.text.strip().split("\n\n")
        assert blocks[0].split("\n") == ["1", "00:00:00,400 --> 00:00:01,400", "alpha"]
        assert blocks[1].split("\n")[::2] == ["2", "bravo"]
        response = await send(server, response_format="vtt")
        assert response.text.startswith("WEBVTT\n\n00:00:00.400 --> 00:00:01.400\nalpha\n\n")
        assert response.headers["content-type"] == "text/plain; charset=utf-8"


async def test_text_cannot_break_subtitles(tmp_path: Path) -> None:
    core = SpeechCore(answer=lambda _: [at(0.0), *text(" a\n\n1 --> 2 <b>&"), at(3661.5 % 30), END])
    async with speech_server(tmp_path, core) as server:
        srt = (await send(server, response_format="srt")).text
        assert srt.count("-->") == 1
        assert "a 1 -> 2 <b>&" in srt
        vtt = (await send(server, response_format="vtt")).text
        assert vtt.count("-->") == 1
        assert "a 1 -&gt; 2 &lt;b&gt;&amp;" in vtt


async def test_verbose_json_has_segments_and_words(tmp_path: Path) -> None:
    async with speech_server(tmp_path, SpeechCore(probs=speaks("de", no_speech=0.25))) as server:
        fields: dict[str, Any] = {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]}
        body = (await send(server, **fields)).json()
        assert (body["task"], body["language"], body["duration"]) == ("transcribe", "de", 3.2)
        assert body["text"] == "alpha bravo"
        assert [segment["text"] for segment in body["segments"]] == [" alpha", " bravo"]
        first = body["segments"][0]
        assert set(first) == {
            *("id", "seek", "start", "end", "text", "tokens", "temperature", "avg_logprob", "compression_ratio"),
            "no_speech_prob",
        }
        assert (first["start"], first["end"]) == (0.4, 1.4)
        assert first["tokens"] == [at(0.4), *text(" alpha"), at(1.4)]
        assert (first["avg_logprob"], first["no_speech_prob"], first["temperature"]) == (-0.5, 0.25, 0.0)
        assert [word["word"] for word in body["words"]] == ["alpha", "bravo"]
        assert body["words"][1]["start"] == pytest.approx(1.8, abs=0.06)
        assert body["usage"]["seconds"] == 4
        only_segments = (await send(server, response_format="verbose_json")).json()
        assert only_segments["words"] is None
        assert len(only_segments["segments"]) == 2
        fields["timestamp_granularities[]"] = ["word"]
        only_words = (await send(server, **fields)).json()
        assert only_words["segments"] is None
        assert len(only_words["words"]) == 2


async def test_long_files_in_other_formats_are_transcribed_whole(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        body = (await send(server, file=LONG, response_format="verbose_json")).json()
        assert body["text"].split() == ["alpha", "bravo"] * 8
        assert [round(segment["start"], 1) for segment in body["segments"]] == [
            round(0.4 + 4.4 * i, 1) for i in range(16)
        ]
        mp3 = encode(spoken((A, 1.0), (B, 1.0))[:, None], "mp3")
        assert (await send(server, file=mp3)).json()["text"] == "alpha bravo"


async def test_translations_are_english(tmp_path: Path) -> None:
    core = SpeechCore(probs=speaks("de"))
    async with speech_server(tmp_path, core) as server:
        body = (await send(server, TRANSLATIONS, response_format="verbose_json", to_language="en")).json()
        assert (body["task"], body["language"], body["text"]) == ("translate", "en", "alpha bravo")
        assert prompts(core)[0][1:3] == [TOKEN["<|de|>"], TOKEN["<|translate|>"]]
        assert "`to_language`" in message(await send(server, TRANSLATIONS, to_language="fr"))
    async with speech_server(tmp_path / "en", english_only(SpeechCore())) as server:
        assert "does not support translation" in message(await send(server, TRANSLATIONS))


async def test_fields_reach_the_engine(tmp_path: Path) -> None:
    core = SpeechCore()
    fields: dict[str, Any] = {
        "model": "fake",
        "language": "de",
        "prompt": "Earlier.",
        "hotwords": "Quire",
        "keywords[]": ["one", "two"],
        "temperature": "0.5",
        "top_p": "0.9",
        "top_k": "5",
        "min_p": "0.1",
        "seed": "7",
        "frequency_penalty": "0.1",
        "presence_penalty": "0.2",
        "repetition_penalty": "1.1",
        "max_completion_tokens": "9",
        "n": "1",
        "use_beam_search": "false",
        "watermarking": "false",
    }
    async with speech_server(tmp_path, core) as server:
        assert (await send(server, **fields)).status_code == 200
        (request,) = added(core)
        params = request.sampling_params
        assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 5, 0.1, 7)
        assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.1, 0.2, 1.1)
        assert params.max_tokens == 9
        earlier = text(" Quire one two Earlier.")
        assert request.prompt.tolist()[: len(earlier) + 1] == [TOKEN["<|startofprev|>"], *earlier]


async def test_the_language_is_chosen_among_those_that_may_be_spoken(tmp_path: Path) -> None:
    core = SpeechCore(probs=lambda message: [0.7, 0.1, 0.2] if len(message.prompt) == 1 else [0.0])
    async with speech_server(tmp_path, core) as server:
        fields: dict[str, Any] = {"languages[]": ["de", "ja"]}
        body = (await send(server, **fields)).json()
        assert body["languages"] == [{"code": "ja"}]


async def test_log_probabilities(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        body = (await send(server, **LOGPROBS)).json()
        entries = body["logprobs"]
        assert bytes(value for entry in entries for value in entry["bytes"]) == b" alpha bravo"
        assert entries[0] == {"token": " ", "logprob": -0.5, "bytes": [32]}


@pytest.mark.parametrize("strategy", [{"chunking_strategy": "auto"}, {"chunking_strategy[type]": "server_vad"}])
async def test_chunking_by_voice_activity(tmp_path: Path, strategy: dict[str, str]) -> None:
    core = SpeechCore()
    async with speech_server(tmp_path, core) as server:
        if "chunking_strategy[type]" in strategy:
            strategy |= {"chunking_strategy[threshold]": "0.6", "chunking_strategy[silence_duration_ms]": "200"}
        silence = wav(tone(3.0, level=0.0))
        assert (await send(server, file=silence, **strategy)).json()["text"] == ""
        assert added(core) == []
        strategy |= {"chunking_strategy[wrong]": "1"}
        assert "chunking_strategy" in message(await send(server, file=silence, **strategy))


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"response_format": "diarized_json"}, "response_format", "speaker diarization"),
        ({"response_format": "xml"}, "response_format", "srt"),
        ({"language": "English"}, "language", "`: de, en, ja"),
        ({"languages[]": "xx"}, "languages", "`: de, en, ja"),
        ({"temperature": "-1"}, "temperature", "greater"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "verbose_json"),
        ({"timestamp_granularities[]": "day", "response_format": "verbose_json"}, "timestamp_granularities[0]", "word"),
        ({"include[]": "logprobs", "response_format": "text"}, "include", "json"),
        ({"stream": "true", "response_format": "verbose_json"}, "response_format", "streamed"),
        ({"stream": "true", "stream_format": "other"}, "stream_format", "vllm"),
        ({"n": "2"}, "n", "requires `use_beam_search`"),
        ({"n": "0", "use_beam_search": "true"}, "n", "greater"),
        ({"n": "1000", "use_beam_search": "true"}, "n", "may be at most"),
        ({"length_penalty": "2"}, "length_penalty", "requires `use_beam_search`"),
        ({"length_penalty": "nan", "use_beam_search": "true"}, "length_penalty", ""),
        ({"use_beam_search": "true", "stream": "true"}, "use_beam_search", "stream=True"),
        ({"use_beam_search": "true", "response_format": "verbose_json"}, "response_format", "Formats with beam search"),
        ({"use_beam_search": "true", "response_format": "srt"}, "response_format", "Formats with beam search"),
        ({"use_beam_search": "true", "temperature": "0.4"}, "temperature", "cannot be combined"),
        ({"use_beam_search": "true", "top_p": "0.4"}, "top_p", "cannot be combined"),
        ({"use_beam_search": "true", "repetition_penalty": "1.4"}, "repetition_penalty", "cannot be combined"),
        ({"vllm_xargs": '{"a": 1}'}, "vllm_xargs", "not supported"),
        ({"known_speaker_names[]": "agent"}, "known_speaker_names", "not supported"),
        ({"delay": "low"}, "delay", "not supported"),
        ({"to_language": "fr"}, "to_language", "English"),
        ({"prompt": ["a", "b"]}, "prompt", "twice"),
        ({"logits_processors": "x"}, "logits_processors", "not supported"),
        ({"seed": "1.5"}, "seed", "integer"),
    ],
)
async def test_fields_are_refused_by_name(tmp_path: Path, fields: dict[str, Any], param: str, reason: str) -> None:
    core = SpeechCore()
    async with speech_server(tmp_path, core) as server:
        response = await send(server, **fields)
        assert reason in message(response)
        assert response.json()["error"]["param"] == param
        assert added(core) == []


async def test_unknown_fields_are_named_or_refused(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        assert (await send(server, colour="red", user="me")).headers["x-quire-ignored-fields"] == "colour"
    async with speech_server(tmp_path, strict_fields=True) as server:
        assert "`colour`" in message(await send(server, colour="red"))


async def test_models_are_told_apart_by_their_tasks(tmp_path: Path) -> None:
    async with speech_server(tmp_path, SpeechCore(), FakeCore()) as server:
        cards = (await server.http.get("/v1/models")).json()["data"]
        assert {card["id"]: card["tasks"] for card in cards}["fake"] == ["transcribe"]
        assert "supports: generate" in message(await send(server, model="fake-1"))
        message(await send(server, model="nothing"), 404)
        chat = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
        assert "supports: transcribe" in message(await server.post("/v1/chat/completions", chat))
        assert "supports: transcribe" in message(await server.post("/v1/completions", {"model": "fake", "prompt": "x"}))
        assert (await send(server)).json()["text"] == "alpha bravo"


async def test_a_full_queue_refuses_before_a_file_is_decoded(tmp_path: Path) -> None:
    core = SpeechCore()
    core.hold.set()
    async with speech_server(tmp_path, core, capacity=1) as server:
        first = asyncio.create_task(send(server, language="en"))
        await until(lambda: core.active)
        response = await send(server, file=b"not even audio")
        assert "busy" in message(response, 503)
        assert int(response.headers["retry-after"]) >= 1
        core.hold.clear()
        assert (await first).status_code == 200


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_a_disconnect_aborts_everything(tmp_path: Path, stream: str) -> None:
    core = SpeechCore()
    core.hold.set()
    async with speech_server(tmp_path, core) as server:
        client = server.state.models[0].client
        task = asyncio.create_task(send(server, file=LONG, stream=stream, language="en"))
        await until(lambda: len(core.active) > 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: client.slots_in_use == 0 and client.open_streams == 0)
        core.hold.clear()
        await until(lambda: not core.active)
        assert (await send(server)).status_code == 200


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


async def test_streams_have_openais_events(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        response = await send(server, file=LONG, stream="true", **LOGPROBS)
        events = events_of(response)
        assert {event["type"] for event in events[:-1]} == {"transcript.text.delta"}
        last = events[-1]
        assert last["type"] == "transcript.text.done"
        assert last["text"].split() == ["alpha", "bravo"] * 8
        assert "".join(event["delta"] for event in events[:-1]) == last["text"]
        assert [entry for event in events[:-1] for entry in event["logprobs"]] == last["logprobs"]
        assert last["usage"]["type"] == "tokens"
        assert last["usage"]["seconds"] == 71
        assert "[DONE]" not in response.text


@pytest.mark.parametrize("how", ["field", "option"])
async def test_streams_have_vllms_chunks_if_asked_for(tmp_path: Path, how: str) -> None:
    settings: dict[str, Any] = {"transcription_events": "vllm"} if how == "option" else {}
    fields = {"stream_format": "vllm"} if how == "field" else {}
    async with speech_server(tmp_path, **settings) as server:
        response = await send(server, stream="true", stream_include_usage="true", **fields)
        chunks = events_of(response)
        assert response.text.endswith("data: [DONE]\n\n")
        assert {chunk["object"] for chunk in chunks} == {"transcription.chunk"}
        assert chunks[0]["id"].startswith("transcribe-")
        *pieces, last, usage = chunks
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in pieces) == "alpha bravo"
        assert last["choices"][0]["finish_reason"] == "stop"
        assert usage["choices"] == []
        assert usage["usage"] == {"prompt_tokens": 164, "completion_tokens": 13, "total_tokens": 177}
        plain = events_of(await send(server, TRANSLATIONS, stream="true", stream_format="vllm"))
        assert {chunk["object"] for chunk in plain} == {"translation.chunk"}
        assert all("usage" not in chunk for chunk in plain)


@pytest.mark.parametrize(("file", "windows"), [(AUDIO, 1), (LONG, 3)])
async def test_chunks_have_the_tokens_so_far(tmp_path: Path, file: bytes, windows: int) -> None:
    fields = {"stream": "true", "stream_format": "vllm", "language": "en"}
    flags = {"stream_include_usage": "true", "stream_continuous_usage_stats": "true"}
    async with speech_server(tmp_path) as server:
        *pieces, last, whole = events_of(await send(server, file=file, **fields, **flags))
    texts = accumulate(chunk["choices"][0]["delta"]["content"] for chunk in pieces)
    prompt_tokens = [chunk["usage"]["prompt_tokens"] for chunk in pieces]  # grows where a window begins
    ended = [sorted(set(prompt_tokens)).index(count) for count in prompt_tokens]
    # A token is a byte, or the end of a window, which may come with the last bytes. The text lacks the first space.
    expected = [1 + len(text) + ends for text, ends in zip(texts, ended, strict=True)]
    counts = [chunk["usage"]["completion_tokens"] for chunk in pieces]
    assert all(count - least in (0, 1) for count, least in zip(counts, expected, strict=True))
    assert ended[-1] == windows - 1
    assert prompt_tokens == sorted(prompt_tokens)
    assert last["usage"] == whole["usage"]
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (
        prompt_tokens[-1],
        expected[-1] + 1,
    )


async def test_chunks_of_a_text_that_was_cut_end_with_length(tmp_path: Path) -> None:
    fields = {"stream": "true", "stream_format": "vllm", "language": "en"}
    async with speech_server(tmp_path) as server:
        *pieces, last = events_of(await send(server, max_completion_tokens="3", **fields))
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in pieces) == "al"
        assert last["choices"][0]["finish_reason"] == "length"
        *_, last = events_of(await send(server, max_completion_tokens="400", **fields))
        assert last["choices"][0]["finish_reason"] == "stop"


async def test_an_error_within_a_stream_is_an_event(tmp_path: Path) -> None:
    core = SpeechCore(die_at_step=6)
    async with speech_server(tmp_path, core) as server:
        events = events_of(await send(server, stream="true", language="en"))
        assert events[-1]["error"]["code"] == 503


async def test_a_timeout_is_408(tmp_path: Path) -> None:
    core = SpeechCore()
    core.hold.set()
    async with speech_server(tmp_path, core) as server:
        assert "timed out" in message(await send(server, timeout="0.2"), 408)


async def test_seconds_of_audio_are_counted(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        await send(server)
        metrics = (await server.http.get("/metrics")).text
        assert 'quire:audio_seconds_total{engine="0",model_name="fake"} 3.2' in metrics


async def test_the_schema_describes_the_form(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        schema = (await server.http.get("/openapi.json")).json()
        fields = {"file", "model", "timeout"}
        for path, more in ((PATH, {"language", "stream"}), (TRANSLATIONS, {"stream"}), ("/v1/audio/languages", set())):
            form = schema["paths"][path]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
            assert form["required"] == ["file"]
            assert fields | more <= set(form["properties"])
            assert "$ref" not in json.dumps(form)
