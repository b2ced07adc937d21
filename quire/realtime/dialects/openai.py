"""OpenAI's events: generally available, and the beta before it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import ClassVar

from msgspec import UNSET

from quire.realtime.client_events import ClientEvent, SessionUpdate, TranscriptionSessionUpdate, convert
from quire.realtime.dialects.dialect import Body, SessionInfo
from quire.realtime.dialects.openai_session import (
    BetaSession,
    Session,
    apply,
    apply_beta,
    beta_session_body,
    session_body,
)
from quire.realtime.errors import EventError
from quire.realtime.settings import SessionSettings
from quire.realtime.transcript import Transcript, Usage
from quire.speech.types import TokenLogprob

_TRANSCRIPTION = "conversation.item.input_audio_transcription"


class OpenAI:
    """The events of transcription sessions in GA."""

    commits_end_utterances: ClassVar[bool] = True
    defaults: ClassVar[SessionSettings] = SessionSettings()
    item_events: ClassVar[tuple[str, ...]] = ("conversation.item.added",)

    def __init__(self) -> None:
        self._previous: dict[str, str | None] = {}  # the item before each one that is in progress

    def updated_settings(self, event: ClientEvent, settings: SessionSettings) -> SessionSettings:
        """The settings after `session.update`."""
        if not isinstance(event, SessionUpdate):
            raise EventError(
                f"{event.kind} is an event of the beta API; this session uses the GA API; send session.update.",
                "unknown_event",
                "type",
            )
        if event.session is UNSET:
            raise EventError("session.update needs a `session`.", "invalid_event", "session")
        return apply(convert(event.session, Session, "session"), settings)

    def session(self, session: SessionInfo) -> Body:
        """The session object of events."""
        return session_body(session)

    def created(self, session: SessionInfo) -> list[Body]:
        """The first event. It has the fields of vLLM's as well."""
        body = self._event("session.created", id=f"sess-{session.key}", created=session.created)
        return [{**body, "session": self.session(session)}]

    def updated(self, session: SessionInfo) -> list[Body]:
        """The settings after an update."""
        return [self._event("session.updated", session=self.session(session))]

    def error(self, error: EventError) -> list[Body]:
        """The error event for a client event that was refused."""
        detail = {
            "type": "invalid_request_error",
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "event_id": error.event_id,
        }
        return [self._event("error", error=detail)]

    def session_error(self, code: str, message: str) -> list[Body]:
        """The error event before the session ends."""
        kind = "server_error" if code == "server_error" else "invalid_request_error"
        return [self._event("error", error={**_error(kind, code, message), "event_id": None})]

    def speech_started(self, item: str, milliseconds: int) -> list[Body]:
        """Event for speech that was noticed, and has begun at this time."""
        return [self._event("input_audio_buffer.speech_started", audio_start_ms=milliseconds, item_id=item)]

    def speech_stopped(self, item: str, milliseconds: int) -> list[Body]:
        """Event for speech that has ended at this time."""
        return [self._event("input_audio_buffer.speech_stopped", audio_end_ms=milliseconds, item_id=item)]

    def committed(self, item: str, previous: str | None) -> list[Body]:
        """The audio of an item is complete."""
        body = _item(item, "in_progress", None)
        self._previous[item] = previous
        return [
            self._event("input_audio_buffer.committed", item_id=item, previous_item_id=previous),
            *(self._event(kind, item=body, previous_item_id=previous) for kind in self.item_events),
        ]

    def cleared(self) -> list[Body]:
        """Event for audio that was discarded."""
        return [self._event("input_audio_buffer.cleared")]

    def delta(self, item: str, text: str, logprobs: Sequence[TokenLogprob] | None) -> list[Body]:
        """Event for more text of an item."""
        body = self._event(f"{_TRANSCRIPTION}.delta", item_id=item, content_index=0, delta=text)
        return [body | _logprobs(logprobs)]

    def completed(self, item: str, transcript: Transcript) -> list[Body]:
        """Event for all text of an item."""
        text = transcript.text
        usage = _usage(transcript.usage)
        body = self._event(f"{_TRANSCRIPTION}.completed", item_id=item, content_index=0, transcript=text, usage=usage)
        if transcript.language is not None:
            body["languages"] = [{"code": transcript.language}]
        return [body | _logprobs(transcript.logprobs), *self._done(item, "completed", text)]

    def failed(self, item: str, code: str, message: str, *, is_server_error: bool) -> list[Body]:
        """The failed event of an item that could not be transcribed."""
        kind = "server_error" if is_server_error else "invalid_request_error"
        error = _error(kind, code, message)
        failed = self._event(f"{_TRANSCRIPTION}.failed", item_id=item, content_index=0, error=error)
        return [failed, *self._done(item, "incomplete", None)]

    def generated(self) -> list[Body]:
        """No events: only vLLM's dialect has generations."""
        return []

    def drained(self) -> list[Body]:
        """No events: each utterance has its own."""
        return []

    def _done(self, item: str, status: str, text: str | None) -> list[Body]:
        body = _item(item, status, text)
        return [self._event("conversation.item.done", item=body, previous_item_id=self._previous.pop(item, None))]

    @staticmethod
    def _event(kind: str, **fields: object) -> Body:
        return {"type": kind, "event_id": f"event_{uuid.uuid4().hex[:24]}", **fields}


class OpenAIBeta(OpenAI):
    """The events of the beta.

    Attributes:
        of_transcription: the session was requested as a transcription session, whose events have other names.
    """

    item_events: ClassVar[tuple[str, ...]] = ("conversation.item.created",)

    def __init__(self, *, of_transcription: bool) -> None:
        super().__init__()
        self.of_transcription = of_transcription

    def updated_settings(self, event: ClientEvent, settings: SessionSettings) -> SessionSettings:
        """The settings after `transcription_session.update` or `session.update`."""
        assert isinstance(event, SessionUpdate | TranscriptionSessionUpdate)
        if event.session is UNSET:
            raise EventError(f"{event.kind} needs a `session`.", "invalid_event", "session")
        self.of_transcription = isinstance(event, TranscriptionSessionUpdate)
        return apply_beta(convert(event.session, BetaSession, "session"), settings)

    def session(self, session: SessionInfo) -> Body:
        """The session object of events."""
        return beta_session_body(session, of_transcription=self.of_transcription)

    def created(self, session: SessionInfo) -> list[Body]:
        """The first event."""
        return [{**super().created(session)[0], "type": f"{self._prefix}.created"}]

    def updated(self, session: SessionInfo) -> list[Body]:
        """The settings after an update."""
        return [self._event(f"{self._prefix}.updated", session=self.session(session))]

    @property
    def _prefix(self) -> str:
        return "transcription_session" if self.of_transcription else "session"

    def _done(self, item: str, status: str, text: str | None) -> list[Body]:
        self._previous.pop(item, None)
        return []


def _error(kind: str, code: str, message: str) -> Body:
    return {"type": kind, "code": code, "message": message, "param": None}


def _item(item: str, status: str, transcript: str | None) -> Body:
    return {
        "id": item,
        "type": "message",
        "object": "realtime.item",
        "role": "user",
        "status": status,
        "content": [{"type": "input_audio", "transcript": transcript}],
    }


def _logprobs(entries: Sequence[TokenLogprob] | None) -> Body:
    if entries is None:
        return {}
    return {
        "logprobs": [{"token": token.token, "logprob": token.logprob, "bytes": list(token.bytes)} for token in entries]
    }


def _usage(usage: Usage) -> Body:
    if not usage.output_tokens:
        return {"type": "duration", "seconds": usage.seconds}
    input_tokens = usage.audio_tokens + usage.text_tokens
    return {
        "type": "tokens",
        "input_tokens": input_tokens,
        "output_tokens": usage.output_tokens,
        "total_tokens": input_tokens + usage.output_tokens,
        "input_token_details": {"audio_tokens": usage.audio_tokens, "text_tokens": usage.text_tokens},
    }
