"""Streams of transcriptions: OpenAI's events, or vLLM's chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from quire.api.http.sse import event
from quire.api.speech_to_text.answers import SpeechToTextRequestBody, languages_of, logprob_list, usage_of
from quire.speech.types import SpeechTask, TokenLogprob, TranscriptDelta, TranscriptionDone, TranscriptionEvent

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
