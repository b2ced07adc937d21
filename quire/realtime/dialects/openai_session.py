"""OpenAI's session objects: parsing of updates, and serialization of settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.protocol.errors import shorten
from quire.realtime.audio import PCM_24K, PCMA, PCMU, AudioFormat
from quire.realtime.dialects.dialect import Body, SessionInfo
from quire.realtime.errors import EventError
from quire.realtime.settings import Delay, NoiseReduction, SessionSettings, TurnDetection

LOGPROBS = "item.input_audio_transcription.logprobs"
_Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=10_000)]
_Ignored = msgspec.Raw | UnsetType
_Word = Annotated[str, msgspec.Meta(max_length=100)]
_BETA_FORMATS = {"pcm16": PCM_24K, "g711_ulaw": PCMU, "g711_alaw": PCMA}


class ServerVad(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="server_vad"):
    """Voice activity detection. `noise_floor` is Quire's own: dB of full scale below which there is no speech."""

    threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    prefix_padding_ms: _Milliseconds | None = None
    silence_duration_ms: Annotated[int, msgspec.Meta(ge=50, le=10_000)] | None = None
    noise_floor: Annotated[float, msgspec.Meta(ge=-100, le=0)] | None = None
    idle_timeout_ms: int | None = None
    create_response: bool | None = None
    interrupt_response: bool | None = None


class SemanticVad(msgspec.Struct, frozen=True, tag_field="type", tag="semantic_vad"):
    """Accepted by the schema, then refused with an error that names it."""


Detection = ServerVad | SemanticVad | None | UnsetType


class Pcm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="audio/pcm"):
    """16-bit PCM."""

    rate: Literal[16000, 24000] = 24000


class MuLaw(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="audio/pcmu"):
    """G.711 µ-law at 8 kHz."""


class ALaw(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="audio/pcma"):
    """G.711 A-law at 8 kHz."""


class Transcription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model of the transcription, and context for it."""

    model: str | None = None
    language: Annotated[str, msgspec.Meta(max_length=32)] | None = None
    languages: Annotated[list[_Word], msgspec.Meta(max_length=100)] | None = None
    prompt: Annotated[str, msgspec.Meta(max_length=4096)] | None = None
    keywords: Annotated[list[_Word], msgspec.Meta(max_length=100)] | None = None
    delay: Delay | None = None


class Noise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The type of the microphone."""

    type: NoiseReduction
    strength: float | None = None


class Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`audio.input` of a session."""

    format: Pcm | MuLaw | ALaw | UnsetType = UNSET
    transcription: Transcription | UnsetType | None = UNSET
    noise_reduction: Noise | UnsetType | None = UNSET
    turn_detection: Detection = UNSET


class Audio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`audio` of a session."""

    input: Input = Input()
    output: _Ignored = UNSET


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A session in GA. What speech-to-speech sessions and the session objects of events have beside it is ignored."""

    type: Literal["transcription", "realtime"] = "transcription"
    audio: Audio = Audio()
    model: str | None = None
    include: list[str] | UnsetType | None = UNSET
    id: _Ignored = UNSET
    object: _Ignored = UNSET
    expires_at: _Ignored = UNSET
    instructions: _Ignored = UNSET
    max_output_tokens: _Ignored = UNSET
    output_modalities: _Ignored = UNSET
    parallel_tool_calls: _Ignored = UNSET
    prompt: _Ignored = UNSET
    reasoning: _Ignored = UNSET
    tool_choice: _Ignored = UNSET
    tools: _Ignored = UNSET
    tracing: _Ignored = UNSET
    truncation: _Ignored = UNSET


class BetaSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A session in the beta, whose fields are flat. As in GA, what has no meaning for transcription is ignored.

    `input_audio_transcription.model` comes before `model`.
    """

    input_audio_format: Literal["pcm16", "g711_ulaw", "g711_alaw"] | UnsetType = UNSET
    input_audio_transcription: Transcription | UnsetType | None = UNSET
    input_audio_noise_reduction: Noise | UnsetType | None = UNSET
    turn_detection: Detection = UNSET
    model: str | None = None
    include: list[str] | UnsetType | None = UNSET
    id: _Ignored = UNSET
    object: _Ignored = UNSET
    expires_at: _Ignored = UNSET
    client_secret: _Ignored = UNSET
    instructions: _Ignored = UNSET
    max_response_output_tokens: _Ignored = UNSET
    modalities: _Ignored = UNSET
    output_audio_format: _Ignored = UNSET
    speed: _Ignored = UNSET
    temperature: _Ignored = UNSET
    tool_choice: _Ignored = UNSET
    tools: _Ignored = UNSET
    tracing: _Ignored = UNSET
    voice: _Ignored = UNSET


def apply(session: Session, settings: SessionSettings) -> SessionSettings:
    """The settings after an update in GA.

    Raises:
        EventError: a setting is not supported.
    """
    audio_input = session.audio.input
    path = "session.audio.input"
    if session.model is not None:
        settings = replace(settings, model=session.model)
    if audio_input.format is not UNSET:
        settings = replace(settings, audio_format=_format(audio_input.format))
    settings = _with_transcription(audio_input.transcription, settings, f"{path}.transcription")
    settings = _with_noise(audio_input.noise_reduction, settings, f"{path}.noise_reduction")
    settings = _with_detection(audio_input.turn_detection, settings, f"{path}.turn_detection")
    return _with_include(session.include, settings)


def apply_beta(session: BetaSession, settings: SessionSettings) -> SessionSettings:
    """The settings after an update in the beta.

    Raises:
        EventError: a setting is not supported.
    """
    if session.input_audio_format is not UNSET:
        settings = replace(settings, audio_format=_BETA_FORMATS[session.input_audio_format])
    transcription = session.input_audio_transcription
    settings = _with_transcription(transcription, settings, "session.input_audio_transcription")
    settings = _with_noise(session.input_audio_noise_reduction, settings, "session.input_audio_noise_reduction")
    settings = _with_detection(session.turn_detection, settings, "session.turn_detection")
    if session.model is not None and (transcription is UNSET or transcription is None or transcription.model is None):
        settings = replace(settings, model=session.model)
    return _with_include(session.include, settings)


def session_body(session: SessionInfo) -> Body:
    """A session in GA."""
    settings = session.settings
    return {
        "id": f"sess_{session.key}",
        "object": "realtime.transcription_session",
        "type": "transcription",
        "audio": {
            "input": {
                "format": _format_body(settings.audio_format),
                "transcription": _transcription_body(settings),
                "noise_reduction": settings.noise_reduction and {"type": settings.noise_reduction},
                "turn_detection": _detection_body(settings.turn_detection),
            }
        },
        "include": [LOGPROBS] if settings.logprobs else None,
        "expires_at": session.expires_at,
    }


def beta_session_body(session: SessionInfo, *, of_transcription: bool) -> Body:
    """A session in the beta; `of_transcription`: a transcription session."""
    settings = session.settings
    kind: Body = {"object": "realtime.transcription_session"}
    if not of_transcription:
        kind = {"object": "realtime.session", "model": settings.model}
    formats = {audio_format: name for name, audio_format in _BETA_FORMATS.items()}
    return {
        "id": f"sess_{session.key}",
        **kind,
        "modalities": ["text"],
        "input_audio_format": formats.get(settings.audio_format, "pcm16"),
        "input_audio_transcription": _transcription_body(settings),
        "input_audio_noise_reduction": settings.noise_reduction and {"type": settings.noise_reduction},
        "turn_detection": _detection_body(settings.turn_detection),
        "include": [LOGPROBS] if settings.logprobs else None,
        "expires_at": session.expires_at,
    }


def _format(audio_format: Pcm | MuLaw | ALaw) -> AudioFormat:
    match audio_format:
        case Pcm(rate=rate):
            return AudioFormat("pcm", rate)
        case MuLaw():
            return PCMU
        case ALaw():
            return PCMA


def _with_transcription(
    transcription: Transcription | UnsetType | None, settings: SessionSettings, path: str
) -> SessionSettings:
    if transcription is UNSET:
        return settings
    if transcription is None:
        raise EventError(f"{path}: null is not supported, sessions always transcribe.", "unsupported_value", path)
    languages = {name for name in (transcription.language, *(transcription.languages or ())) if name}
    if len(languages) > 1:
        raise EventError(f"{path}.languages: only one language is supported.", "unsupported_value", f"{path}.languages")
    hints = [transcription.prompt or "", ", ".join(transcription.keywords or ())]
    return replace(
        settings,
        model=transcription.model or settings.model,
        language=next(iter(languages), None),
        prompt="\n".join(hint for hint in hints if hint),
        delay=transcription.delay,
    )


def _with_noise(noise: Noise | UnsetType | None, settings: SessionSettings, path: str) -> SessionSettings:
    if noise is UNSET:
        return settings
    if noise is not None and noise.strength is not None:
        raise EventError(f"{path}.strength is not supported; leave it out.", "unsupported_value", f"{path}.strength")
    return replace(settings, noise_reduction=None if noise is None else noise.type)


def _with_detection(detection: Detection, settings: SessionSettings, path: str) -> SessionSettings:
    match detection:
        case msgspec.UnsetType():
            return settings
        case None:
            return replace(settings, turn_detection=None)
        case SemanticVad():
            raise EventError(
                f"{path}.type: semantic_vad is not supported; use type server_vad, or set turn_detection to null.",
                "unsupported_value",
                f"{path}.type",
            )
        case ServerVad():
            if detection.idle_timeout_ms is not None:
                raise EventError(
                    f"{path}.idle_timeout_ms is not supported: sessions of this server transcribe only.",
                    "unsupported_value",
                    f"{path}.idle_timeout_ms",
                )
            default = TurnDetection()
            return replace(
                settings,
                turn_detection=TurnDetection(
                    default.threshold if detection.threshold is None else detection.threshold,
                    default.prefix_padding_ms if detection.prefix_padding_ms is None else detection.prefix_padding_ms,
                    default.silence_duration_ms
                    if detection.silence_duration_ms is None
                    else detection.silence_duration_ms,
                    detection.noise_floor,
                ),
            )


def _with_include(include: list[str] | UnsetType | None, settings: SessionSettings) -> SessionSettings:
    if include is UNSET:
        return settings
    for name in include or ():
        if name != LOGPROBS:
            message = f"session.include: {shorten(name)!r} is not supported; accepted is {LOGPROBS!r}."
            raise EventError(message, "unsupported_value", "session.include")
    return replace(settings, logprobs=bool(include))


def _format_body(audio_format: AudioFormat) -> Body:
    if audio_format.encoding == "pcm":
        return {"type": "audio/pcm", "rate": audio_format.rate}
    return {"type": f"audio/{audio_format.encoding}"}


def _transcription_body(settings: SessionSettings) -> Body:
    body: dict[str, Any] = {"model": settings.model, "language": settings.language, "prompt": settings.prompt}
    return body if settings.delay is None else {**body, "delay": settings.delay}


def _detection_body(detection: TurnDetection | None) -> Body | None:
    if detection is None:
        return None
    body: Body = {
        "type": "server_vad",
        "threshold": detection.threshold,
        "prefix_padding_ms": detection.prefix_padding_ms,
        "silence_duration_ms": detection.silence_duration_ms,
    }
    return body if detection.noise_floor is None else {**body, "noise_floor": detection.noise_floor}
