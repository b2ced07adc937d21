"""Answers in each format: JSON, subtitles, and streams of events."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
from starlette.responses import Response

from quire.api.http.sse import event
from quire.protocol.speech_to_text import (
    InputTokenDetails,
    Transcription,
    TranscriptionRequest,
    TranscriptionUsageBody,
    TranscriptLogprob,
    TranscriptSegment,
    TranscriptWord,
    TranslationRequest,
    VerboseTranscription,
)
from quire.speech.types import (
    Segment,
    SpeechTask,
    TokenLogprob,
    TranscriptDelta,
    TranscriptionDone,
    TranscriptionEvent,
    TranscriptionUsage,
)

SpeechToTextRequestBody = TranscriptionRequest | TranslationRequest


def usage_of(usage: TranscriptionUsage, kind: Literal["duration", "tokens"]) -> TranscriptionUsageBody:
    """Seconds, rounded up, and tokens."""
    return TranscriptionUsageBody(
        type=kind,
        seconds=math.ceil(usage.seconds),
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        total_tokens=usage.input_tokens + usage.output_tokens,
        input_token_details=InputTokenDetails(audio_tokens=usage.audio_tokens, text_tokens=usage.text_tokens),
    )


def logprob_list(entries: Sequence[TokenLogprob]) -> list[TranscriptLogprob]:
    """Log-probabilities as OpenAI has them."""
    return [TranscriptLogprob(token=entry.token, logprob=entry.logprob, bytes=list(entry.bytes)) for entry in entries]


def languages_of(result: TranscriptionDone, task: SpeechTask) -> list[dict[str, str]] | None:
    """The languages of the speech as OpenAI lists them."""
    return [{"code": result.language}] if task == "transcribe" and result.language else None


def answer(
    body: SpeechToTextRequestBody, task: SpeechTask, result: TranscriptionDone, logprobs: Sequence[TokenLogprob]
) -> Response:
    """The response in the format that the request asks for."""
    match body.response_format:
        case "text":
            return _plain(f"{result.text}\n")
        case "srt":
            return _plain(srt(result.segments))
        case "vtt":
            return _plain(vtt(result.segments))
        case "verbose_json":
            return _json(_verbose(body, task, result))
    listed = logprob_list(logprobs) if isinstance(body, TranscriptionRequest) and body.include else None
    return _json(
        Transcription(
            text=result.text,
            usage=usage_of(result.usage, "duration"),
            languages=languages_of(result, task),
            logprobs=listed,
        )
    )


def _verbose(body: SpeechToTextRequestBody, task: SpeechTask, result: TranscriptionDone) -> VerboseTranscription:
    granularities = body.timestamp_granularities if isinstance(body, TranscriptionRequest) else []
    segments = [_segment(segment) for segment in result.segments]
    words = [
        TranscriptWord(word=word.word, start=_rounded(word.start), end=_rounded(word.end)) for word in result.words
    ]
    return VerboseTranscription(
        task=task,
        language="en" if task == "translate" else result.language or "",
        duration=_rounded(result.duration),
        text=result.text,
        segments=segments if not granularities or "segment" in granularities else None,
        words=words if "word" in granularities else None,
        usage=usage_of(result.usage, "duration"),
    )


def _segment(segment: Segment) -> TranscriptSegment:
    return TranscriptSegment(
        id=segment.id,
        seek=segment.seek,
        start=_rounded(segment.start),
        end=_rounded(segment.end),
        text=segment.text,
        tokens=list(segment.tokens),
        temperature=segment.temperature,
        avg_logprob=segment.avg_logprob,
        compression_ratio=segment.compression_ratio,
        no_speech_prob=segment.no_speech_prob,
    )


def _rounded(seconds: float) -> float:
    return round(seconds, 3)


def _json(body: Transcription | VerboseTranscription) -> Response:
    content = body.model_dump()
    for name in ("languages", "logprobs"):
        if content.get(name, ()) is None:
            del content[name]
    return Response(orjson.dumps(content), media_type="application/json")


def _plain(text: str) -> Response:
    return Response(text.encode(errors="replace"), media_type="text/plain; charset=utf-8")


def srt(segments: Sequence[Segment]) -> str:
    """The segments as SubRip."""
    return "".join(
        f"{number}\n{_time(segment.start, ',')} --> {_time(segment.end, ',')}\n{_line(segment.text)}\n\n"
        for number, segment in enumerate(segments, 1)
    )


def vtt(segments: Sequence[Segment]) -> str:
    """The segments as WebVTT."""
    cues = (f"{_time(cue.start, '.')} --> {_time(cue.end, '.')}\n{_escaped(_line(cue.text))}\n\n" for cue in segments)
    return "WEBVTT\n\n" + "".join(cues)


def _line(text: str) -> str:
    """The text in one line; an empty one would end the cue. The arrow separates times."""
    return " ".join(text.split()).replace("-->", "->")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"


Events = AsyncGenerator[TranscriptionEvent, None]


async def openai_events(
    events: Events, task: SpeechTask, ended: Callable[[], None], *, logprobs: bool
) -> AsyncGenerator[bytes, None]:
    """`transcript.text.delta` for each piece, then `transcript.text.done`.

    Args:
        events: events of the transcription.
        task: task of the endpoint.
        ended: called once the engine has finished.
        logprobs: events have log-probabilities.
    """
    entries: list[TokenLogprob] = []
    async with aclosing(events) as transcription:
        async for part in transcription:
            if isinstance(part, TranscriptDelta):
                body: dict[str, Any] = {"type": "transcript.text.delta", "delta": part.text}
                if logprobs:
                    entries += part.logprobs
                    body["logprobs"] = [entry.model_dump() for entry in logprob_list(part.logprobs)]
                yield event(body)
            elif isinstance(part, TranscriptionDone):
                ended()
                body = {"type": "transcript.text.done", "text": part.text}
                if logprobs:
                    body["logprobs"] = [entry.model_dump() for entry in logprob_list(entries)]
                if languages := languages_of(part, task):
                    body["languages"] = languages
                yield event({**body, "usage": usage_of(part.usage, "tokens").model_dump()})


@dataclass(frozen=True, slots=True)
class TranscriptionChunkFields:
    """Fields that all chunks of a stream share."""

    id: str
    model: str
    task: SpeechTask
    created: int = field(default_factory=lambda: int(time.time()))

    def chunk(self, choices: list[dict[str, Any]], **fields: Any) -> bytes:
        """An encoded chunk."""
        kind = "translation.chunk" if self.task == "translate" else "transcription.chunk"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return event({**head, "choices": choices, **fields})


async def vllm_chunks(
    events: Events, head: TranscriptionChunkFields, body: SpeechToTextRequestBody, ended: Callable[[], None]
) -> AsyncGenerator[bytes, None]:
    """A chunk for each piece, one with the finish reason, and one with the usage if requested."""
    continuous = bool(body.stream_include_usage and body.stream_continuous_usage_stats)
    prompted = generated = 0
    async with aclosing(events) as transcription:
        async for part in transcription:
            if isinstance(part, TranscriptDelta):
                prompted += part.input_tokens
                generated += part.output_tokens
                usage = {"usage": _counts(prompted, generated)} if continuous else {}
                yield head.chunk([_choice({"content": part.text}, None)], **usage)
            elif isinstance(part, TranscriptionDone):
                ended()
                counts = _counts(part.usage.input_tokens, part.usage.output_tokens)
                reason = "length" if part.truncated else "stop"
                yield head.chunk([_choice({"content": ""}, reason)], **({"usage": counts} if continuous else {}))
                if body.stream_include_usage:
                    yield head.chunk([], usage=counts)


def _choice(delta: dict[str, str], finish_reason: str | None) -> dict[str, Any]:
    return {"delta": delta, "finish_reason": finish_reason, "stop_reason": None}


def _counts(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
