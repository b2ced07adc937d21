"""Log-probabilities in the shapes of chat, completions and prompts."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from quire.engine.wire.protocol import TokenLogprobs
from quire.multimodal.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no minus infinity


class TextPosition:
    """Characters of a text before its next token; one that several tokens make up counts behind the last of them."""

    def __init__(self) -> None:
        self.characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def advance(self, token: bytes) -> None:
        """Go behind a token."""
        self.characters += len(self._decoder.decode(token))


class LogprobFormatter:
    """Writes tokens as text, or as `token_id:N` where a request wants that."""

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
        """Columns of a completion choice's `logprobs`, from a position of its text on.

        An entry is none where there was nothing to predict a token from.
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
        for token, logprob in pairs:  # the first, the token itself, wins over others of equal text
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
    return value if math.isfinite(value) else _LEAST
