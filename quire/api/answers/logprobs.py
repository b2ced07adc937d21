"""Formats log-probabilities for chat, completions and prompts."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from quire.engine.wire.protocol import TokenLogprobs
from quire.multimodal.tokenizer import Tokenizer

_MIN_LOGPROB = -9999.0  # JSON has no minus infinity


class TextPosition:
    """Offset of the next token in a text. A character made of several tokens is counted after the last of them."""

    def __init__(self) -> None:
        self.characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def advance(self, token: bytes) -> None:
        """Advance past a token."""
        self.characters += len(self._decoder.decode(token))


class LogprobFormatter:
    """Formats log-probabilities, with tokens as text, or as `token_id:N` if `as_ids`."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def chat(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Items of a chat choice's `logprobs.content`."""
        return [
            {
                **self._candidate(entry, 0),
                "top_logprobs": [self._candidate(entry, i) for i in range(1, len(entry.ranks))],
            }
            for entry in entries
        ]

    def completion(
        self, entries: Sequence[TokenLogprobs | None], tokens: Sequence[int], position: TextPosition
    ) -> dict[str, Any]:
        """Columns of a completion choice's `logprobs`, from a position in its text.

        The entry of the first token of a prompt is None.
        """
        texts = [self._text(token) for token in tokens]
        offsets = []
        for token in tokens:
            offsets.append(position.characters)
            position.advance(self._tokenizer.token_bytes(token))
        return {
            "text_offset": offsets,
            "token_logprobs": [None if entry is None else _finite(entry.logprobs[0]) for entry in entries],
            "tokens": texts,
            "top_logprobs": [None if entry is None else self._by_text(entry) for entry in entries],
        }

    def prompt(self, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """Items of `prompt_logprobs`: candidates by token id."""
        return [None if entry is None else self._by_id(entry) for entry in entries]

    def _by_id(self, entry: TokenLogprobs) -> dict[str, Any]:
        return {
            str(token): {
                "logprob": _finite(logprob),
                "rank": rank,
                "decoded_token": self._tokenizer.token_text(token),
            }
            for token, logprob, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True)
        }

    def _by_text(self, entry: TokenLogprobs) -> dict[str, float]:
        pairs = zip(entry.token_ids, entry.logprobs, strict=True)
        texts: dict[str, float] = {}
        for (
            token,
            logprob,
        ) in pairs:  # the first one is the token itself; it takes precedence over others with the same text
            texts.setdefault(self._text(token), _finite(logprob))
        return texts

    def _candidate(self, entry: TokenLogprobs, index: int) -> dict[str, Any]:
        token = entry.token_ids[index]
        return {
            "token": self._text(token),
            "logprob": _finite(entry.logprobs[index]),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _MIN_LOGPROB
