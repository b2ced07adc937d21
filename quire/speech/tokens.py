"""The tokens of a speech model: prompts, what may be sampled, which tokens are text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.engine.client.model_info import Transcribes
from quire.engine.client.protocol import TokenArray
from quire.engine.client.sampling_params import TimestampRule
from quire.engine.client.token_mask import TokenMask, token_mask
from quire.rendering.tokenizer import Tokenizer
from quire.speech.types import TranscriptionOptions

_NOT_SPOKEN = re.compile(r"[^\w\ufffd]|_")  # U+FFFD: a part of a character
_MAX_PROMPT_CHARACTERS = 1 << 13  # of earlier text; only its last tokens are used


@dataclass(frozen=True, slots=True)
class TranscriptionPrompt:
    """The tokens before the text.

    Attributes:
        start: index of the start token, behind the earlier text.
    """

    tokens: TokenArray
    start: int


class TranscriptionTokens:
    """The special tokens of a model that generates, and what follows from them.

    Attributes:
        start: the token that begins each prompt, after the earlier text.
        end: the token that ends the text.
        rule: the rule for timestamps; None if the model writes none.
    """

    def __init__(self, info: Transcribes, tokenizer: Tokenizer, vocab_size: int) -> None:
        assert info.start_token is not None
        assert info.end_token is not None
        self.info = info
        self.start, self.end = info.start_token, info.end_token
        self._tokenizer = tokenizer
        self._first_time = vocab_size if info.timestamp_begin is None else info.timestamp_begin
        named = (self.start, info.transcribe_token, info.translate_token, info.previous_token, info.no_speech_token)
        control = {token for token in named if token is not None} | set(info.languages.values())
        no_times = set() if info.no_timestamps_token is None else {info.no_timestamps_token}
        self._special = frozenset({*control, self.end, *no_times, *tokenizer.special_tokens.values()})
        never = {*control, *info.suppress_tokens}
        without_times = {*never, *no_times, *range(self._first_time, vocab_size)}
        self._allowed = {True: _others(never, vocab_size), False: _others(without_times, vocab_size)}
        self._forbidden = frozenset(without_times)
        self.rule = self._rule()

    def _rule(self) -> TimestampRule | None:
        info = self.info
        if info.timestamp_begin is None or info.no_timestamps_token is None:
            return None
        return TimestampRule(
            begin=info.timestamp_begin,
            no_timestamps=info.no_timestamps_token,
            end=self.end,
            max_initial=info.max_initial_timestamp,
        )

    def allowed(self, *, timestamps: bool) -> TokenMask:
        """The tokens that may be sampled."""
        return self._allowed[timestamps]

    def forbids(self, token: int, index: int) -> bool:
        """Whether a text without timestamps may not have a token at an index."""
        return token in self._forbidden or (not index and token in self.info.begin_suppress_tokens)

    def is_text(self, token: int) -> bool:
        """Whether a token has text."""
        return token < self._first_time and token not in self._special

    def is_word(self, token: int) -> bool:
        """Whether a token is spoken, wholly or in part: not punctuation alone."""
        return self.is_text(token) and spoken(self._tokenizer.token_text(token)) != ""

    def is_timestamp(self, token: int) -> bool:
        """Whether a token is a time."""
        return token >= self._first_time

    def seconds(self, token: int) -> float:
        """The time of a timestamp token, in seconds from the start of its window."""
        return (token - self._first_time) * self.info.time_precision

    def earlier_text(self, options: TranscriptionOptions) -> list[int]:
        """Tokens of hotwords and prompt; the last ones, as many as the model takes. May take milliseconds."""
        texts = [text for part in (options.hotwords, options.prompt) if (text := part.strip())]
        text = " ".join(texts)[-_MAX_PROMPT_CHARACTERS:]
        if not text or self.info.previous_token is None:
            return []
        tokens = self._tokenizer.encode(f" {text}", add_special_tokens=False)
        text_tokens = [token for token in tokens if self.is_text(token)]
        return text_tokens[-(self.info.max_output_tokens // 2 - 1) :]

    def prompt(
        self, options: TranscriptionOptions, language: str | None, earlier: Sequence[int] = ()
    ) -> TranscriptionPrompt:
        """The prompt of a window. `earlier`: see `earlier_text`."""
        info = self.info
        before = [info.previous_token, *earlier] if earlier and info.previous_token is not None else []
        task = info.translate_token if options.task == "translate" else info.transcribe_token
        control: list[int | None] = [self.start, info.languages.get(language or ""), task]
        if not options.timestamps:
            control.append(info.no_timestamps_token)
        tokens = [*before, *(token for token in control if token is not None)]
        return TranscriptionPrompt(np.array(tokens, np.int32), len(before))

    def text_bytes(self, token: int) -> bytes:
        """Bytes of a token."""
        return self._tokenizer.token_bytes(token)


def spoken(text: str) -> str:
    """What of a text is spoken: without punctuation, capitals and spaces."""
    return _NOT_SPOKEN.sub("", text).casefold()


def _others(tokens: set[int], vocab_size: int) -> TokenMask:
    members = np.ones(vocab_size, np.bool_)
    members[[token for token in tokens if 0 <= token < vocab_size]] = False
    return token_mask(np.flatnonzero(members).astype(np.int32), vocab_size)
