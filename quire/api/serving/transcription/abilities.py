"""Which options of a transcription a model can follow."""

from __future__ import annotations

from collections.abc import Iterator

from quire.api.serving.transcription.types import TranscriptionOptions
from quire.engine.wire.protocol import SpeechInfo

_NO_LANGUAGE = "it writes the language that it was trained for, and cannot be told another one"
_NO_TEXT = "it does not read text"
_NO_CHOICE = "it chooses the likeliest text and does not sample"
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty"),
)
_LIKELIEST = TranscriptionOptions()


def refused_options(info: SpeechInfo, options: TranscriptionOptions) -> Iterator[tuple[str, str]]:
    """Fields whose values the model cannot follow, and why."""
    if info.kind != "whisper":
        if options.language is not None:
            yield "language", _NO_LANGUAGE
        if options.languages:
            yield "languages", _NO_LANGUAGE
    if info.previous_token is None:
        if options.prompt.strip():
            yield "prompt", _NO_TEXT
        if options.hotwords.strip():
            yield "hotwords", f"{_NO_TEXT}, and `keywords` are hotwords as well"
    if info.kind == "ctc":
        for name in _sampling_options(options):
            yield name, _NO_CHOICE


def _sampling_options(options: TranscriptionOptions) -> Iterator[str]:
    """Those that ask for another text than the likeliest."""
    for name in _SAMPLING:
        if getattr(options, name) != getattr(_LIKELIEST, name):
            yield name
