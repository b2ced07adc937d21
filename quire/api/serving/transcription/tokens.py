"""The tokens of a speech model: prompts, what may be sampled, which tokens are text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.api.serving.transcription.types import TranscriptionOptions
from quire.engine.wire.protocol import SpeechInfo, TimestampRule, TokenArray
from quire.engine.wire.token_mask import TokenMask, token_mask
from quire.multimodal.tokenizer import Tokenizer

_MAX_PROMPT_CHARACTERS = 1 << 13  # of earlier text; only its last tokens are used


@dataclass(frozen=True, slots=True)
class SpeechPrompt:
    """The tokens before the text.

    Attributes:
        start: index of the start token, behind the earlier text.
    """

    tokens: TokenArray
    start: int


class SpeechTokens:
    """The special tokens of one model, and what follows from them."""

    def __init__(self, info: SpeechInfo, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.info = info
        self._tokenizer = tokenizer
        named = (info.start_token, info.transcribe_token, info.translate_token, info.previous_token)
        control = {token for token in (*named, info.no_speech_token) if token is not None}
        control |= set(info.languages.values())
        self._special = frozenset(
            {*control, info.end_token, info.no_timestamps_token, *tokenizer.special_tokens.values()}
        )
        never = {*control, *info.suppress_tokens}
        without_times = {*never, info.no_timestamps_token, *range(info.timestamp_begin, vocab_size)}
        self._allowed = {True: _others(never, vocab_size), False: _others(without_times, vocab_size)}
        self.rule = TimestampRule(
            begin=info.timestamp_begin,
            no_timestamps=info.no_timestamps_token,
            end=info.end_token,
            max_initial=info.max_initial_timestamp,
        )

    def allowed(self, *, timestamps: bool) -> TokenMask:
        """The tokens that may be sampled."""
        return self._allowed[timestamps]

    def is_text(self, token: int) -> bool:
        """Whether a token has text."""
        return token < self.info.timestamp_begin and token not in self._special

    def is_timestamp(self, token: int) -> bool:
        """Whether a token is a time."""
        return token >= self.info.timestamp_begin

    def seconds(self, token: int) -> float:
        """The time that a timestamp token says, in seconds from the start of its window."""
        return (token - self.info.timestamp_begin) * self.info.time_precision

    def earlier_text(self, options: TranscriptionOptions) -> list[int]:
        """Tokens of hotwords and prompt; the last ones, as many as the model takes. May take milliseconds."""
        texts = [text for part in (options.hotwords, options.prompt) if (text := part.strip())]
        text = " ".join(texts)[-_MAX_PROMPT_CHARACTERS:]
        if not text or self.info.previous_token is None:
            return []
        tokens = self._tokenizer.encode(f" {text}", add_special_tokens=False)
        kept = [token for token in tokens if self.is_text(token)]
        return kept[-(self.info.max_output_tokens // 2 - 1) :]

    def prompt(self, options: TranscriptionOptions, language: str | None, earlier: Sequence[int] = ()) -> SpeechPrompt:
        """The prompt of a window. `earlier`: see `earlier_text`."""
        info = self.info
        before = [info.previous_token, *earlier] if earlier and info.previous_token is not None else []
        task = info.translate_token if options.task == "translate" else info.transcribe_token
        control: list[int | None] = [info.start_token, info.languages.get(language or ""), task]
        if not options.timestamps:
            control.append(info.no_timestamps_token)
        tokens = [*before, *(token for token in control if token is not None)]
        return SpeechPrompt(np.array(tokens, np.int32), len(before))

    def text_bytes(self, token: int) -> bytes:
        """Bytes of a token."""
        return self._tokenizer.token_bytes(token)


def _others(tokens: set[int], vocab_size: int) -> TokenMask:
    members = np.ones(vocab_size, np.bool_)
    members[[token for token in tokens if 0 <= token < vocab_size]] = False
    return token_mask(np.flatnonzero(members).astype(np.int32), vocab_size)
