"""Transcripts of a server: of files in every format, and of realtime sessions."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import soxr
from openai import AsyncOpenAI

from benchmarks.transcripts.recordings import RATE, JoinedSpeech
from benchmarks.transcripts.scores import Timed

FORMATS = ("json", "json streamed", "text", "srt", "vtt", "verbose_json", "verbose_json with words")
_SESSION_RATE = 24_000  # samples per second, OpenAI's
_PIECE = _SESSION_RATE // 2
_PATIENCE = 900.0  # seconds
_SLACK = 0.5  # seconds by which an utterance may end before its last sentence does
_ADDRESS = re.compile(r"at (http://\S+)")
_CUE = re.compile(r"(\d+):(\d+):(\d+)[.,](\d+) --> (\d+):(\d+):(\d+)[.,](\d+)\n(.*)")


@dataclass(frozen=True, slots=True)
class Answer:
    """A transcript; without cues or words if the format has none."""

    text: str
    cues: list[Timed] | None = None
    words: list[Timed] | None = None

    @classmethod
    def read(cls, text: str, cues: Sequence[Any] | None, words: Sequence[Any] | None) -> Answer:
        """Make one of lists of text, start and end."""
        made = [None if entries is None else [Timed(*entry) for entry in entries] for entries in (cues, words)]
        return cls(text, *made)


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """Run `quire serve` on a free port, and give its address."""
    with tempfile.TemporaryDirectory() as folder, (log := Path(folder, "log")).open("w") as output:
        store = ("--response-store", f"sqlite:///{folder}/responses.db")
        process = subprocess.Popen(
            [sys.executable, "-m", "quire", "serve", *arguments, *store, "--port", "0"], stdout=output, stderr=output
        )
        try:
            yield _address(process, log)
        finally:
            process.terminate()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + _PATIENCE
    while (match := _ADDRESS.search(lines := log.read_text())) is None:
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the server does not listen:\n{lines}")
        time.sleep(0.1)
    return match[1]


def post(url: str, wav: bytes, name: str, *, vad: bool = False) -> Answer:
    """Transcribe a file in one of `FORMATS`. `vad`: windows are cut by voice activity."""
    form, *details = name.split(" ", 1)
    fields: dict[str, Any] = {"response_format": form, "language": "en"}
    if vad:
        fields |= {"chunking_strategy[type]": "server_vad"}
    if details == ["with words"]:
        fields["timestamp_granularities[]"] = ["word", "segment"]
    if details == ["streamed"]:
        fields["stream"] = "true"
    answer = httpx.post(
        f"{url}/v1/audio/transcriptions", files={"file": ("speech.wav", wav)}, data=fields, timeout=_PATIENCE
    )
    assert answer.is_success, answer.text
    if details == ["streamed"]:
        return Answer(_streamed(answer.text))
    if form == "json":
        return Answer(answer.json()["text"])
    if form == "text":
        return Answer(answer.text)
    if form in ("srt", "vtt"):
        cues = [_cue(match) for match in _CUE.finditer(answer.text)]
        return Answer(" ".join(cue.text for cue in cues), cues)
    body = answer.json()
    cues = [Timed(segment["text"], segment["start"], segment["end"]) for segment in body["segments"]]
    words = [Timed(word["word"], word["start"], word["end"]) for word in body["words"] or []]
    return Answer(body["text"], cues, words if details else None)


def _streamed(lines: str) -> str:
    events = [json.loads(line.removeprefix("data: ")) for line in lines.splitlines() if line.startswith("data: {")]
    text = "".join(event["delta"] for event in events if event["type"] == "transcript.text.delta")
    assert text == events[-1]["text"], "the pieces of a stream are not its text"
    return text


def _cue(match: re.Match[str]) -> Timed:
    numbers = [int(part) for part in match.groups()[:8]]
    start, end = (
        hours * 3600 + minutes * 60 + seconds + milliseconds / 1000
        for hours, minutes, seconds, milliseconds in (numbers[:4], numbers[4:])
    )
    return Timed(match[9], start, end)


async def over_realtime(url: str, speech: JoinedSpeech) -> Answer:
    """Transcribe by a session with server_vad, faster than the audio would be spoken."""
    samples = np.concatenate([speech.samples, np.zeros(2 * RATE, np.float32)])
    pcm = (soxr.resample(samples, RATE, _SESSION_RATE).clip(-1, 1) * 32767).astype(np.int16)
    options: Any = {"ping_interval": None}  # a ping would wait behind minutes of audio
    async with (
        asyncio.timeout(_PATIENCE),
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
        client.realtime.connect(
            model=(await client.models.list()).data[0].id, websocket_connection_options=options
        ) as connection,
    ):
        source = {
            "format": {"type": "audio/pcm", "rate": _SESSION_RATE},
            "transcription": {"language": "en"},
            "turn_detection": {"type": "server_vad"},
        }
        session: Any = {"type": "transcription", "audio": {"input": source}}
        await connection.session.update(session=session)
        texts = asyncio.create_task(_transcripts(connection, speech))
        for start in range(0, len(pcm), _PIECE):
            piece = base64.b64encode(pcm[start : start + _PIECE].tobytes()).decode()
            await connection.input_audio_buffer.append(audio=piece)
        return Answer(" ".join(await texts))


async def _transcripts(connection: Any, speech: JoinedSpeech) -> list[str]:
    """The transcripts of all utterances, until the one that has the last sentence."""
    order, texts = list[str](), dict[str, str]()
    last_speech = 0.0
    async for event in connection:
        if event.type == "input_audio_buffer.speech_started":
            order.append(event.item_id)
        elif event.type == "input_audio_buffer.speech_stopped":
            last_speech = event.audio_end_ms / 1000
        elif event.type == "conversation.item.input_audio_transcription.completed":
            texts[event.item_id] = event.transcript
        assert event.type not in ("error", "conversation.item.input_audio_transcription.failed"), event.to_json()
        if last_speech > speech.sentences[-1].end - _SLACK and len(texts) == len(order):
            break
    return [texts[item] for item in order]
