"""Tokens to text as they come: incremental decoding and stop strings."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_CONTEXT_TOKENS = 6  # enough of the prompt for a decoder that glues pieces to see what came before


class TextParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens become text, and where the text ends."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0  # stop strings are looked for behind these


class Detokenizer:
    """Text of one sequence. Text that may be the start of a stop string is held back until that is decided."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: TextParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._decoder = self._new_decoder([int(token) for token in prompt[-_CONTEXT_TOKENS:]])
        self._held = ""  # decoded, not yet given out
        self._hold = max((len(stop) for stop in params.stop), default=1) - 1
        self._count = 0
        self.matched: str | None = None

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """New text that is certain. After the stop string `matched`, further tokens give nothing."""
        out = []
        for token in token_ids:
            if self.matched is not None:
                break
            self._count += 1
            out.append(self._take(self._decode(token)))
        if last and self.matched is None:
            out.append(self._held)
            self._held = ""
        return "".join(out)

    @property
    def tokens_used(self) -> int:
        """Tokens that were decoded, up to and with the one that completed a stop string."""
        return self._count

    def _take(self, text: str) -> str:
        if not self._params.stop:
            return text
        seen = len(self._held)
        self._held += text
        if self._count > self._params.min_tokens and text and (cut := self._find_stop(seen)) is not None:
            given, self._held = self._held[:cut], ""
            return given
        cut = len(self._held) - self._undecided()
        given, self._held = self._held[:cut], self._held[cut:]
        return given

    def _undecided(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for length in range(min(self._hold, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._params.stop):
                return length
        return 0

    def _find_stop(self, seen: int) -> int | None:
        """Where the text ends, if a stop string ends in what is new; the earliest match wins."""
        found = [
            (at, stop) for stop in self._params.stop if (at := self._held.find(stop, max(0, seen - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        at, self.matched = min(found)
        return at + len(self.matched) if self._params.include_stop else at

    def _decode(self, token: int) -> str:
        try:
            return self._decoder.step(self._tokenizer, token) or ""
        except Exception as error:
            # A token that rewrites text already given (some decoders merge backwards): start afresh from it.
            if "prefix" not in str(error).lower():
                raise
            self._decoder = self._new_decoder([])
            return self._decoder.step(self._tokenizer, token) or ""

    def _new_decoder(self, context: list[int]) -> DecodeStream:
        return DecodeStream(ids=context, skip_special_tokens=self._params.skip_special_tokens)
