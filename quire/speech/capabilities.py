"""Capabilities of models that transcribe, and a check of request options against them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quire.engine.client.model_info import Transcribes
from quire.engine.client.sampling_params import GREEDY, NUMBERS
from quire.engine.client.streaming import Streams, TransducerInfo
from quire.multimodal.audio.frames import frame_samples
from quire.protocol.errors import InvalidRequest, shorten
from quire.speech.types import TranscriptionOptions

_NO_LANGUAGE = "it transcribes one language only"
_NO_TEXT = "it takes no text prompt"
_NO_CHOICE = "it always returns the most likely text, without sampling"
_READS_ONCE = "it reads audio while it generates, and only once"
_STREAMING_SECONDS = 600.0  # longest window of a model that reads audio while it arrives: 30 MB of features
_ONLY_LANGUAGE = "en"  # of whispers that have no tokens for languages


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Capabilities of a model that transcribes.

    Attributes:
        window_seconds: longest audio of one request to the engine.
        languages: ISO codes that `language` may have; empty: the option is not supported.
        detects_language: it gives probabilities of languages, so that `languages` can restrict the detection.
        translates: it translates into English.
        aligns_words: it gives word timestamps.
        takes_prompt: `prompt` and `hotwords` are supported.
        generates: it generates tokens autoregressively, so that sampling options and a token limit apply.
        searches_beams: it generates tokens by requests that beam search can repeat.
        rehears: it hears doubtful audio again; see `TranscriptionOptions`.
    """

    window_seconds: float
    languages: tuple[str, ...]
    detects_language: bool = False
    translates: bool = False
    aligns_words: bool = False
    takes_prompt: bool = True
    generates: bool = True
    searches_beams: bool = True
    rehears: bool = False


def speech_to_text_capabilities(info: Transcribes) -> Capabilities:
    """Capabilities of a model that only transcribes."""
    only = only_language(info)
    return Capabilities(
        window_seconds=info.window_seconds,
        languages=tuple(info.languages) or (() if only is None else (only,)),
        detects_language=True,
        translates=info.translate_token is not None,
        aligns_words=info.aligns_words,
        takes_prompt=info.previous_token is not None,
        generates=info.kind != "ctc",
        searches_beams=info.kind != "ctc",
        rehears=info.kind != "ctc",
    )


def streaming_capabilities(info: Streams, max_model_len: int) -> Capabilities:
    """Capabilities of a model that transcribes audio while it arrives."""
    is_transducer = isinstance(info, TransducerInfo)
    frames = max_model_len if isinstance(info, TransducerInfo) else max_model_len - info.silent_frames - 1
    return Capabilities(
        window_seconds=max(0.5, min(_STREAMING_SECONDS, frames * frame_samples(info) / info.sample_rate)),
        languages=(),
        aligns_words=is_transducer,
        takes_prompt=False,
        generates=not is_transducer,
        searches_beams=False,
    )


def only_language(info: Transcribes) -> str | None:
    """The language of a monolingual model; None if it has several languages, or its language is not known."""
    return _ONLY_LANGUAGE if info.kind == "whisper" and not info.languages else None


def check_options(model: str, capabilities: Capabilities, options: TranscriptionOptions) -> None:
    """Refuse options that a model does not support. `model`: name of the model, for the error.

    Raises:
        InvalidRequest: an option is not supported by the model.
    """
    for field, reason in _unsupported_fields(capabilities, options):
        raise InvalidRequest(f"`{field}` is not supported by the model `{model}`: {reason}.", field)
    language = () if options.language is None else (options.language,)
    for field, codes in (("language", language), ("languages", options.languages)):
        for code in codes:
            if code not in capabilities.languages:
                raise InvalidRequest(
                    f"Unsupported language: {shorten(code)!r}. Languages of the model `{model}`: "
                    f"{', '.join(sorted(capabilities.languages))}.",
                    field,
                )
    if options.task == "translate" and not capabilities.translates:
        raise InvalidRequest(f"The model `{model}` does not support translation.", "model")
    if options.words and not capabilities.aligns_words:
        raise InvalidRequest(f"The model `{model}` does not support word timestamps.", "timestamp_granularities")


def _unsupported_fields(capabilities: Capabilities, options: TranscriptionOptions) -> Iterator[tuple[str, str]]:
    """Fields that the model does not support with any value, and the reasons."""
    if options.language is not None and not capabilities.languages:
        yield "language", _NO_LANGUAGE
    if options.languages and not (capabilities.languages and capabilities.detects_language):
        yield (
            "languages",
            "it does not detect the language among several; use `language`" if capabilities.languages else _NO_LANGUAGE,
        )
    if not capabilities.takes_prompt:
        if options.prompt.strip():
            yield "prompt", _NO_TEXT
        if options.hotwords.strip():
            yield "hotwords", f"{_NO_TEXT} (`keywords` is another name of `hotwords`)"
    if options.beams and not capabilities.searches_beams:
        yield "use_beam_search", _NO_CHOICE if not capabilities.generates else _READS_ONCE
    if not capabilities.generates:
        for name in NUMBERS:
            if getattr(options.numbers, name) != getattr(GREEDY, name):
                yield name, _NO_CHOICE
