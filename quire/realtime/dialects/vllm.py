"""vLLM's own events: a client starts a generation, sends audio, and ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from quire.realtime.audio import PCM_16K
from quire.realtime.client_events import ClientEvent, SessionUpdate
from quire.realtime.dialects.dialect import Body, SessionInfo
from quire.realtime.dialects.openai import OpenAI
from quire.realtime.errors import EventError
from quire.realtime.settings import SessionSettings
from quire.realtime.stable_prefix import separator
from quire.realtime.transcript import Transcript, Usage
from quire.speech.types import TokenLogprob

_CODES = {"event_too_large": "invalid_event", "unsupported_event": "unknown_event"}
_KNOWN = ("invalid_json", "invalid_audio", "model_not_validated", "model_not_found", "unknown_event", "invalid_event")


class Vllm:
    """The events of vLLM. A generation consists of utterances; its text is their texts, joined."""

    commits_end_utterances: ClassVar[bool] = False
    defaults: ClassVar[SessionSettings] = SessionSettings(audio_format=PCM_16K)

    def __init__(self) -> None:
        self._text = ""  # of the utterances of this generation that are complete
        self._begun: set[str] = set()  # utterances that are not, whose text was sent in part
        self._usage = Usage(0.0)

    def updated_settings(self, event: ClientEvent, settings: SessionSettings) -> SessionSettings:
        """The settings after `session.update`."""
        if not isinstance(event, SessionUpdate):
            raise EventError(f"Unknown event type {event.kind!r}.", "unknown_event", "type")
        if not isinstance(event.model, str) or not event.model:
            raise EventError("session.update needs a `model`.", "invalid_event", "model")
        return replace(settings, model=event.model)

    def created(self, session: SessionInfo) -> list[Body]:
        """The first event, with the fields of OpenAI's."""
        return OpenAI().created(session)

    def updated(self, session: SessionInfo) -> list[Body]:
        """No events: vLLM has none for this."""
        return []

    def error(self, error: EventError) -> list[Body]:
        """The error event for a client event that was refused."""
        code = _CODES.get(error.code, error.code)
        return [_error(code if code in _KNOWN else "invalid_event", error.message)]

    def session_error(self, code: str, message: str) -> list[Body]:
        """The error event before the session ends."""
        return [_error(code, message)]

    def speech_started(self, item: str, milliseconds: int) -> list[Body]:
        """No events: vLLM has none for this."""
        return []

    def speech_stopped(self, item: str, milliseconds: int) -> list[Body]:
        """No events: vLLM has none for this."""
        return []

    def committed(self, item: str, previous: str | None) -> list[Body]:
        """No events: vLLM has none for this."""
        return []

    def cleared(self) -> list[Body]:
        """No events: vLLM has none for this."""
        return []

    def delta(self, item: str, text: str, logprobs: Sequence[TokenLogprob] | None) -> list[Body]:
        """transcription.delta, with more text."""
        if item not in self._begun:
            self._begun.add(item)
            text = separator(self._text, text) + text
        return [{"type": "transcription.delta", "delta": text}]

    def completed(self, item: str, transcript: Transcript) -> list[Body]:
        """No events: the text is part of the transcription.done event of the generation."""
        self._begun.discard(item)
        self._text += separator(self._text, transcript.text) + transcript.text
        self._usage += transcript.usage
        return []

    def failed(self, item: str, code: str, message: str, *, is_server_error: bool) -> list[Body]:
        """An utterance could not be transcribed."""
        self._begun.discard(item)
        return [_error("processing_error", message)]

    def generated(self) -> list[Body]:
        """transcription.done, with the text of the whole generation."""
        text, usage = self._text, self._usage
        self._text = ""
        self._usage = Usage(0.0)
        prompt_tokens = usage.audio_tokens + usage.text_tokens
        counts = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": prompt_tokens + usage.output_tokens,
        }
        return [{"type": "transcription.done", "text": text, "usage": counts}]

    def drained(self) -> list[Body]:
        """transcription.done of the generation that runs, if any of its audio was transcribed."""
        return self.generated() if self._usage.seconds else []


def _error(code: str, message: str) -> Body:
    return {"type": "error", "error": message, "code": code}
