"""POST /v1/audio/transcriptions and /v1/audio/translations, as of OpenAI and vLLM; /v1/audio/languages."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.datastructures import UploadFile
from starlette.responses import Response

from quire.api.http.form import read_form
from quire.api.http.request_head import answer_id
from quire.api.http.routing import CheckedRoute, release_resources, releaser
from quire.api.http.sse import DONE, EventStream, unless_disconnected
from quire.api.speech_to_text.answers import (
    Events,
    SpeechToTextRequestBody,
    TranscriptionChunkFields,
    answer,
    openai_events,
    vllm_chunks,
)
from quire.api.speech_to_text.samples import admitted_audio
from quire.engine.client.deadline import Deadline
from quire.engine.client.sampling_params import GREEDY, SamplingNumbers
from quire.protocol import fields
from quire.protocol.common import ERRORS, openapi_stream
from quire.protocol.errors import InvalidRequest
from quire.protocol.speech_to_text import (
    DetectedLanguage,
    LanguageProbability,
    LanguageRequest,
    SpeechToTextRequest,
    Transcription,
    TranscriptionRequest,
    TranslationRequest,
    VerboseTranscription,
    form_schema,
)
from quire.serving.models import ServedModel, ServerState
from quire.serving.params import numbers_of
from quire.speech.transcriber import Transcriber
from quire.speech.types import (
    SpeechTask,
    TokenLogprob,
    TranscriptDelta,
    TranscriptionDone,
    TranscriptionOptions,
    VoiceOptions,
)

# Fields that other servers know; their defaults are accepted.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "delay": (None,),
    "include_stop_str_in_output": (False,),
    "known_speaker_names": (None,),
    "known_speaker_references": (None,),
    "vllm_xargs": (None, "{}"),
    "watermarking": (False, None),
}
_AUDIO = "the audio"
_LISTS = frozenset({"timestamp_granularities", "include", "languages", "keywords"})  # fields
_MIN_TEMPERATURE = 1e-3  # lower ones overflow the logits
_WITH_TIMES = ("srt", "vtt", "verbose_json")
_PLAIN = {"text/plain": {"schema": {"type": "string"}}}


def router(state: ServerState) -> APIRouter:
    """A router with the endpoints of transcriptions, translations and language detection."""
    routes = APIRouter(route_class=CheckedRoute)
    responses = openapi_stream(Transcription | VerboseTranscription)
    responses[200]["content"].update(_PLAIN)

    @routes.post(
        "/v1/audio/transcriptions",
        responses=responses,
        response_model=None,
        openapi_extra=form_schema(TranscriptionRequest),
    )
    async def create_transcription(request: Request) -> Response:
        """Turn speech into text."""
        file, body = await read_form(request, TranscriptionRequest, _AUDIO, _LISTS)
        return await _answer(request, state, file, body, "transcribe")

    @routes.post(
        "/v1/audio/translations",
        responses=responses,
        response_model=None,
        openapi_extra=form_schema(TranslationRequest),
    )
    async def create_translation(request: Request) -> Response:
        """Turn speech into English text."""
        file, body = await read_form(request, TranslationRequest, _AUDIO, _LISTS)
        return await _answer(request, state, file, body, "translate")

    @routes.post("/v1/audio/languages", responses=ERRORS, openapi_extra=form_schema(LanguageRequest))
    async def detect_language(request: Request) -> DetectedLanguage:
        """Detect the language that is spoken at the beginning of a file."""
        file, body = await read_form(request, LanguageRequest, _AUDIO, _LISTS)
        return await _detect(request, state, file, body)

    return routes


async def _detect(request: Request, state: ServerState, file: UploadFile, body: LanguageRequest) -> DetectedLanguage:
    fields.ignore(request, fields.take_unknown_fields(body))
    model = state.transcribing_model(body.model)
    transcriber = Transcriber(model)
    options = TranscriptionOptions(
        languages=tuple(body.languages), deadline=Deadline(body.timeout, state.limits.request_timeout)
    )
    transcriber.check_detection(options)
    samples = await admitted_audio(request, model, transcriber, file)
    probabilities = await unless_disconnected(request, transcriber.detect_language(samples, options))
    languages = [
        LanguageProbability(code=code, probability=probability)
        for code, probability in sorted(probabilities.items(), key=lambda entry: -entry[1])
    ]
    return DetectedLanguage(language=languages[0].code, probability=languages[0].probability, languages=languages)


async def _answer(
    request: Request, state: ServerState, file: UploadFile, body: SpeechToTextRequestBody, task: SpeechTask
) -> Response:
    """Check, admit, decode, transcribe: what costs least comes first."""
    fields.ignore(request, fields.take_unknown_fields(body))
    _check_supported(body)
    model = state.transcribing_model(body.model)
    transcriber = Transcriber(model)
    options = _options(body, state, task)
    _check_target(body, options)
    transcriber.check(options)
    sequences = max(1, options.beams)
    samples = await admitted_audio(request, model, transcriber, file, sequences)
    events = transcriber.transcribe(samples, options)
    del samples
    if body.stream:
        return _stream(request, state, model, body, task, events)
    try:
        result, logprobs = await unless_disconnected(request, _collect(events))
    finally:
        release_resources(request)
    return answer(body, task, result, logprobs)


def _stream(
    request: Request,
    state: ServerState,
    model: ServedModel,
    body: SpeechToTextRequestBody,
    task: SpeechTask,
    events: Events,
) -> EventStream:
    ended = releaser(request)
    if (body.stream_format or state.transcription_events) == "openai":
        logprobs = isinstance(body, TranscriptionRequest) and bool(body.include)
        chunks = openai_events(events, task, ended, logprobs=logprobs)
        return EventStream(chunks, keepalive=state.sse_keep_alive_interval, done=b"")
    head = TranscriptionChunkFields(answer_id(task, request, None), model.names[0], task)
    return EventStream(vllm_chunks(events, head, body, ended), keepalive=state.sse_keep_alive_interval, done=DONE)


async def _collect(events: Events) -> tuple[TranscriptionDone, list[TokenLogprob]]:
    logprobs: list[TokenLogprob] = []
    async with aclosing(events) as transcription:
        async for event in transcription:
            if isinstance(event, TranscriptDelta):
                logprobs += event.logprobs
            elif isinstance(event, TranscriptionDone):
                return event, logprobs
    raise AssertionError("a transcription ends with TranscriptionDone")


def _numbers(body: SpeechToTextRequestBody) -> SamplingNumbers:
    """The numbers of a request. A low temperature does not become 0, with which text may be decoded again."""
    temperature = max(body.temperature, _MIN_TEMPERATURE) if body.temperature else 0.0
    return msgspec.structs.replace(numbers_of(body, GREEDY), temperature=temperature)


def _options(body: SpeechToTextRequestBody, state: ServerState, task: SpeechTask) -> TranscriptionOptions:
    voice = body.chunking_strategy
    transcription = body if isinstance(body, TranscriptionRequest) else TranscriptionRequest()
    return TranscriptionOptions(
        task=task,
        language=body.language or None,
        languages=tuple(transcription.languages),
        prompt=body.prompt,
        hotwords=" ".join(text for text in (body.hotwords or "", *transcription.keywords) if text),
        numbers=_numbers(body),
        timestamps=body.response_format in _WITH_TIMES,
        words="word" in transcription.timestamp_granularities,
        logprobs=bool(transcription.include),
        live=bool(body.stream),
        voice=_voice(voice),
        max_tokens=body.max_completion_tokens,
        seed=body.seed,
        deadline=Deadline(body.timeout, state.limits.request_timeout),
        beams=_beams(body, state),
        length_penalty=body.length_penalty,
    )


def _beams(body: SpeechToTextRequest, state: ServerState) -> int:
    if body.n > state.limits.max_n:
        raise InvalidRequest(f"`n` may be at most {state.limits.max_n}, not {body.n}.", "n")
    return body.n if body.use_beam_search else 0


def _voice(voice: Any) -> VoiceOptions | None:
    if voice is None or voice == "auto":
        return None if voice is None else VoiceOptions()
    return VoiceOptions(
        threshold=voice.threshold,
        prefix_padding_ms=voice.prefix_padding_ms,
        silence_duration_ms=voice.silence_duration_ms,
    )


def _check_supported(body: SpeechToTextRequest) -> None:
    for name, accepted in _UNSUPPORTED.items():
        if getattr(body, name, accepted[0]) not in accepted:
            raise fields.unsupported(name, [value for value in accepted if value is not None])
    if body.response_format == "diarized_json":
        raise InvalidRequest(
            "The format diarized_json is not supported: this server has no speaker diarization. Supported formats: "
            "json, text, srt, vtt, verbose_json.",
            "response_format",
        )


def _check_target(body: SpeechToTextRequestBody, options: TranscriptionOptions) -> None:
    """Refuse a language of the text that differs from the one that the task produces."""
    target = body.to_language
    if target and options.task == "translate" and target != "en":
        raise InvalidRequest(f"`to_language` must be en, not {target}: translations are English.", "to_language")
    if target and options.task == "transcribe" and target != options.language:
        raise InvalidRequest(
            f"`to_language` of a transcription must equal `language`, which is {options.language or 'not set'}, not "
            f"{target}. /v1/audio/translations translates into English.",
            "to_language",
        )
