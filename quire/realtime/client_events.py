"""Client events: one JSON object each, whose `type` selects the class."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from quire.protocol.errors import shorten
from quire.realtime.errors import EventError

_Id = Annotated[str, msgspec.Meta(max_length=512)]


class Event(msgspec.Struct, frozen=True, tag_field="type", kw_only=True):
    """Base class of client events. Unknown fields are ignored."""

    event_id: _Id | None = None

    @property
    def kind(self) -> str:
        """The event's `type`."""
        return str(type(self).__struct_config__.tag)


class SessionUpdate(Event, frozen=True, tag="session.update", kw_only=True):
    """Change settings. `session` is OpenAI's, as JSON; `model` is vLLM's."""

    session: msgspec.Raw | UnsetType = UNSET
    model: str | UnsetType | None = UNSET


class TranscriptionSessionUpdate(Event, frozen=True, tag="transcription_session.update", kw_only=True):
    """Change settings, in OpenAI's beta."""

    session: msgspec.Raw


class Append(Event, frozen=True, tag="input_audio_buffer.append", kw_only=True):
    """Audio in base64, in the session's format."""

    audio: str


class Commit(Event, frozen=True, tag="input_audio_buffer.commit", kw_only=True):
    """End an utterance. In vLLM's dialect it ends the audio if `final`, else begins it."""

    final: bool | UnsetType = UNSET


class Clear(Event, frozen=True, tag="input_audio_buffer.clear", kw_only=True):
    """Discard the audio that has not been committed."""


ClientEvent = SessionUpdate | TranscriptionSessionUpdate | Append | Commit | Clear
_KINDS: dict[str, type[ClientEvent]] = {
    str(kind.__struct_config__.tag): kind for kind in (SessionUpdate, TranscriptionSessionUpdate, Append, Commit, Clear)
}
# Events of OpenAI's client that have no place in a session that only transcribes.
_SPEECH_TO_SPEECH = ("response.", "conversation.item.", "output_audio_buffer.")
_EVENTS: msgspec.json.Decoder[ClientEvent] = msgspec.json.Decoder(ClientEvent)
_ANY_OBJECT: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])


def parse_event(text: str, max_size: int) -> ClientEvent:
    """One event.

    Args:
        text: content of a WebSocket frame.
        max_size: characters that an event may have.

    Raises:
        EventError: the text is not a valid event.
    """
    if len(text) > max_size:
        raise EventError(
            f"The event has {len(text)} characters; at most {max_size} are accepted (--max-realtime-event-size).",
            "event_too_large",
        )
    try:
        return _EVENTS.decode(text)
    except msgspec.ValidationError as error:
        raise _refusal(text, error) from error
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise EventError(f"The event is not valid JSON: {_reason(error)}.", "invalid_json") from error


def convert(raw: msgspec.Raw, kind: type[Any], path: str) -> Any:
    """A part of an event whose type depends on the dialect.

    Args:
        raw: JSON of the part.
        kind: the type.
        path: path of the part in the event.

    Raises:
        EventError: it is not of this type.
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        message, where = _located(error, path)
        raise EventError(message, "invalid_event", where) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise EventError(f"`{path}` is not valid JSON: {_reason(error)}.", "invalid_json", path) from error


def _refusal(text: str, error: msgspec.ValidationError) -> EventError:
    """Return what is wrong with an event that is JSON."""
    try:
        event = _ANY_OBJECT.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return EventError("An event is a JSON object with a `type`.", "invalid_event")
    refusal = _refusal_of_kind(_text(event.get("type"))) or EventError(*_as_invalid(error))
    refusal.event_id = _text(event.get("event_id"))
    return refusal


def _refusal_of_kind(kind: str | None) -> EventError | None:
    if kind is None:
        return EventError("The event has no `type`.", "invalid_event", "type")
    if kind in _KINDS:
        return None
    if kind.startswith(_SPEECH_TO_SPEECH):
        return EventError(
            f"The event {shorten(kind)!r} is not supported: sessions of this server transcribe only.",
            "unsupported_event",
            "type",
        )
    return EventError(f"Unknown event type {shorten(kind)!r}; known are: {', '.join(_KINDS)}.", "unknown_event", "type")


def _as_invalid(error: msgspec.ValidationError) -> tuple[str, str, str | None]:
    message, where = _located(error, "")
    return message, "invalid_event", where


def _located(error: msgspec.ValidationError, path: str) -> tuple[str, str | None]:
    """The text of an error, and the field that it is about."""
    message, _, inside = str(error).rpartition(" - at `")
    if not message:
        message = str(error)
        inside = ""
    where = f"{path}{inside.rstrip('`').removeprefix('$')}".removeprefix(".")
    return f"{where}: {message}" if where else message, where or None


def _text(raw: msgspec.Raw | None) -> str | None:
    try:
        return None if raw is None else msgspec.json.decode(raw, type=str)[:512]
    except msgspec.MsgspecError:
        return None


def _reason(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error).rstrip(".")
