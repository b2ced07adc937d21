"""What models that transcribe can do, and which options of a transcription they cannot follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quire.api.http.errors import InvalidRequest, shortened
from quire.api.serving.transcription.types import TranscriptionOptions
from quire.engine.wire.protocol import SpeechInfo
from quire.engine.wire.streaming import StreamingInfo
from quire.multimodal.audio.frames import frame_samples

_NO_LANGUAGE = "it writes the language that it was trained for, and cannot be told another one"
_LONGEST_STREAM = 600.0  # seconds of a window of a model that reads audio while it generates: 30 MB of features
_NO_TEXT = "it does not read text beside the audio"
_NO_CHOICE = "it chooses the likeliest text and does not sample"
_ONLY_LANGUAGE = "en"  # of whispers that have no tokens for languages
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty"),
)
_LIKELIEST = TranscriptionOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a model that transcribes can do.

    Attributes:
        window_seconds: longest audio that it takes at once.
        languages: ISO codes that it can be told; empty: none.
        chooses_language: it tells the probabilities of languages, so that some can be excluded.
        translates: into English.
        aligns_words: it gives times of words.
        takes_prompt: earlier text or words to expect can be given.
        generates: tokens are generated, one after the other: their number matters, and they can be sampled.
    """

    window_seconds: float
    languages: tuple[str, ...]
    chooses_language: bool = False
    translates: bool = False
    aligns_words: bool = False
    takes_prompt: bool = True
    generates: bool = True


def speech_abilities(info: SpeechInfo) -> Abilities:
    """What a model that only transcribes can do."""
    only = only_language(info)
    return Abilities(
        window_seconds=info.chunk_seconds,
        languages=tuple(info.languages) or (() if only is None else (only,)),
        chooses_language=True,
        translates=info.translate_token is not None,
        aligns_words=info.aligns_words,
        takes_prompt=info.previous_token is not None,
        generates=info.kind != "ctc",
    )


def streaming_abilities(info: StreamingInfo, max_model_len: int) -> Abilities:
    """What a model can do that reads a frame of audio with each token."""
    frames = max_model_len - info.left_frames - info.right_frames - 1
    return Abilities(
        window_seconds=max(0.5, min(_LONGEST_STREAM, frames * frame_samples(info) / info.sample_rate)),
        languages=(),
        takes_prompt=False,
    )


def only_language(info: SpeechInfo) -> str | None:
    """The language of a model that knows no others; None if it knows several, or does not say which one it writes."""
    return _ONLY_LANGUAGE if info.kind == "whisper" and not info.languages else None


def check_options(model: str, can: Abilities, options: TranscriptionOptions) -> None:
    """Refuse what a model cannot do. `model`: its name, for the error.

    Raises:
        InvalidRequest: it does not know the language, does not translate, does not align words, or has no use for an
            option.
    """
    for field, reason in _useless(can, options):
        raise InvalidRequest(f"`{field}` is not supported by the model `{model}`: {reason}.", field)
    given = () if options.language is None else (options.language,)
    for field, codes in (("language", given), ("languages", options.languages)):
        for code in codes:
            if code not in can.languages:
                raise InvalidRequest(
                    f"Unsupported language: {shortened(code)!r}. The model `{model}` knows: "
                    f"{', '.join(sorted(can.languages))}.",
                    field,
                )
    if options.task == "translate" and not can.translates:
        raise InvalidRequest(f"The model `{model}` does not translate.", "model")
    if options.words and not can.aligns_words:
        raise InvalidRequest(f"The model `{model}` does not give times of words.", "timestamp_granularities")


def _useless(can: Abilities, options: TranscriptionOptions) -> Iterator[tuple[str, str]]:
    """Fields that the model has no use for, whatever their values, and why."""
    if options.language is not None and not can.languages:
        yield "language", _NO_LANGUAGE
    if options.languages and not (can.languages and can.chooses_language):
        yield "languages", "it does not choose among languages; use `language`" if can.languages else _NO_LANGUAGE
    if not can.takes_prompt:
        if options.prompt.strip():
            yield "prompt", _NO_TEXT
        if options.hotwords.strip():
            yield "hotwords", f"{_NO_TEXT}, and `keywords` are hotwords as well"
    if not can.generates:
        for name in _sampling_options(options):
            yield name, _NO_CHOICE


def _sampling_options(options: TranscriptionOptions) -> Iterator[str]:
    """Those that ask for another text than the likeliest."""
    for name in _SAMPLING:
        if getattr(options, name) != getattr(_LIKELIEST, name):
            yield name
