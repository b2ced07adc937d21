"""Answers in each format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import orjson
from starlette.responses import Response

from quire.api.speech_to_text.subtitles import srt, vtt
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
from quire.speech.types import Segment, SpeechTask, TokenLogprob, TranscriptionDone, TranscriptionUsage

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
