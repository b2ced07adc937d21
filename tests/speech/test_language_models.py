"""Language models that read audio transcribe: how they are asked, and what is taken from their answers."""

from __future__ import annotations

from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.engine.client.protocol import AddRequest
from quire.protocol.errors import InvalidRequest
from quire.speech.transcriber import Transcriber
from quire.speech.types import SegmentDone, TranscriptDelta, TranscriptionDone, TranscriptionOptions
from tests.support.audio import Samples, voice, wav
from tests.support.audio_chat import (
    ENDS,
    KINDS,
    PLACEHOLDERS,
    TOKEN,
    AudioCore,
    audio_server,
    audio_tokenizer,
    requests_of,
)
from tests.support.server import Server

PATH = "/v1/audio/transcriptions"


def answers(kind: str, *texts: str) -> Any:
    """One answer after the other, with the end token of the kind."""
    left = list(texts)

    def answer(_: AddRequest) -> list[int]:
        return [*audio_tokenizer().encode(left.pop(0)).ids, TOKEN[ENDS[kind]]]

    return answer


async def events_of(server: Server, audio: Samples, **options: Any) -> list[Any]:
    model = server.state.models[0]
    with model.client.slots(1):
        async with aclosing(Transcriber(model).transcribe(audio, TranscriptionOptions(**options))) as events:
            return [event async for event in events]


def asked(core: AudioCore) -> list[str]:
    """The prompts, with one placeholder in place of all."""
    texts = []
    placeholder = PLACEHOLDERS[core.kind]
    for message in requests_of(core):
        text = audio_tokenizer().decode(message.prompt.tolist(), skip_special_tokens=False)
        length = sum(item.length for item in message.items)
        assert text.count(placeholder) == length
        texts.append(text.replace(placeholder * length, placeholder))
    return texts


PROMPTS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "granite_speech": [
        (
            {},
            "<|im_start|>user\n<|audio|>can you transcribe the speech into a written format?<|im_end|>\n",
        ),
    ],
    "phi4_multimodal": [
        (
            {"language": "it", "hotwords": "Quire"},
            "<|im_start|>user\n<|endoftext11|>Transcribe the audio clip into text. It is in Italian. Words that may "
            "occur: Quire<|im_end|>\n",
        ),
    ],
    "voxtral": [
        ({}, "<s>[INST][BEGIN_AUDIO][AUDIO][/INST][TRANSCRIBE]"),
        ({"language": "de"}, "<s>[INST][BEGIN_AUDIO][AUDIO][/INST]lang:de[TRANSCRIBE]"),
    ],
    "qwen3_asr": [
        (
            {},
            "<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|><|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            {"language": "de", "prompt": "Quire", "hotwords": "Bach"},
            "<|im_start|>system\nBach Quire<|im_end|>\n"
            "<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|><|im_end|>\n"
            "<|im_start|>assistant\nlanguage German<asr_text>",
        ),
    ],
    "qwen2_audio": [
        (
            {"language": "en", "prompt": "Quire"},
            "<|im_start|>user\n<|audio_bos|><|AUDIO|><|audio_eos|>Transcribe the speech word for word, without "
            "comments. It is in English. Words that may occur: Quire<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
async def test_prompts(tmp_path: Path, kind: str) -> None:
    for index, (options, expected) in enumerate(PROMPTS[kind]):
        core = AudioCore(kind=kind, answer=answers(kind, "ab"))
        async with audio_server(tmp_path / str(index), core) as server:
            last = (await events_of(server, voice(1.0), **options))[-1]
        assert asked(core) == [expected]
        assert isinstance(last, TranscriptionDone)
        assert last.text == "ab"
        assert last.language == options.get("language")
        assert last.usage.audio_tokens == sum(item.length for item in requests_of(core)[0].items)


@pytest.mark.parametrize(
    ("answer", "text", "language"),
    [
        ("language German<asr_text>guten Tag", "guten Tag", "de"),
        ("language None<asr_text>", "", None),
        ("language Klingon<asr_text>nuqneH", "nuqneH", None),
        ("no header", "no header", None),
        ("a long text that has no header at all", "a long text that has no header at all", None),
        ("", "", None),
    ],
)
async def test_the_language_in_the_answer(tmp_path: Path, answer: str, text: str, language: str | None) -> None:
    core = AudioCore(kind="qwen3_asr", answer=answers("qwen3_asr", answer))
    async with audio_server(tmp_path, core) as server:
        events = await events_of(server, voice(1.0), logprobs=True)
    last = events[-1]
    assert isinstance(last, TranscriptionDone)
    assert (last.text, last.language) == (text, language)
    pieces = [event for event in events if isinstance(event, TranscriptDelta)]
    assert "".join(piece.text for piece in pieces) == text
    assert "".join(entry.token for piece in pieces for entry in piece.logprobs) == text


async def test_long_audio_is_cut_and_joined(tmp_path: Path) -> None:
    """qwen2_audio takes 30 s; each window is a segment with its times."""
    core = AudioCore(answer=answers("qwen2_audio", "one", "two", "three"))
    audio = np.tile(voice(7.0), 10)
    async with audio_server(tmp_path, core) as server:
        events = await events_of(server, audio, live=False)
    last = events[-1]
    assert isinstance(last, TranscriptionDone)
    assert sorted(last.text.split()) == ["one", "three", "two"]
    segments = [event.segment for event in events if isinstance(event, SegmentDone)]
    assert [segment.text for segment in segments] == last.text.split()
    assert segments[0].start == 0.0
    assert segments[-1].end == pytest.approx(70.0)
    assert all(segment.end == pytest.approx(other.start) for segment, other in pairwise(segments))


async def test_repetition_is_decoded_again(tmp_path: Path) -> None:
    """At a higher temperature, unless the text is read while it is generated."""
    for live, expected, temperatures in ((False, "fine", [0.0, pytest.approx(0.2)]), (True, "la " * 60, [0.0])):
        core = AudioCore(kind="voxtral", answer=answers("voxtral", "la " * 60, "fine"))
        async with audio_server(tmp_path / str(live), core) as server:
            last = (await events_of(server, voice(9.0), live=live))[-1]
        assert last.text == expected.strip()
        assert [message.sampling_params.temperature for message in requests_of(core)] == temperatures


async def test_too_little_audio(tmp_path: Path) -> None:
    core = AudioCore()
    async with audio_server(tmp_path, core) as server:
        last = (await events_of(server, np.zeros(90, np.float32)))[-1]
    assert last.text == ""
    assert requests_of(core) == []


@pytest.mark.parametrize(
    ("kind", "options", "param"),
    [
        ("voxtral", {"language": "xx"}, "language"),
        ("voxtral", {"prompt": "a"}, "prompt"),
        ("voxtral", {"hotwords": "a"}, "hotwords"),
        ("qwen3_asr", {"languages": ("de", "en")}, "languages"),
        ("qwen3_asr", {"words": True}, "timestamp_granularities"),
        ("qwen2_audio", {"task": "translate"}, "model"),
    ],
)
async def test_what_a_model_cannot_do(tmp_path: Path, kind: str, options: dict[str, Any], param: str) -> None:
    async with audio_server(tmp_path, AudioCore(kind=kind)) as server:
        with pytest.raises(InvalidRequest) as refusal:
            Transcriber(server.state.models[0]).check(TranscriptionOptions(**options))
    assert refusal.value.param == param


async def test_through_the_endpoint(tmp_path: Path) -> None:
    """Formats, streams and aborts are those of other models."""
    core = AudioCore(kind="qwen3_asr", answer=answers("qwen3_asr", *["language English<asr_text>hello you"] * 2))
    audio = {"file": ("a.wav", wav(voice(1.0)[:, None]))}
    async with audio_server(tmp_path, core) as server:
        plain = await server.http.post(PATH, files=audio, data={"response_format": "verbose_json"})
        assert plain.status_code == 200, plain.text
        body = plain.json()
        assert (body["text"], body["language"], len(body["segments"])) == ("hello you", "en", 1)
        stream = await server.http.post(PATH, files=audio, data={"stream": "true"})
        assert '"transcript.text.done"' in stream.text
        assert "language English" not in stream.text
        refused = await server.http.post("/v1/audio/translations", files=audio)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "The model `fake` does not support translation."
        assert server.state.models[0].client.slots_in_use == 0
