"""Incremental detokenization and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from quire.engine.client.stop_strings import StopStrings

_CONTEXT_TOKENS = 6  # of the prompt; the text of a token may depend on the tokens before it
_REPLACEMENT = "\ufffd"  # replacement character: decoders emit it for invalid and for incomplete UTF-8
_MAX_HELD_TOKENS = 24  # tokens held until a character is complete; after these it counts as invalid


class TextParams(msgspec.Struct, frozen=True, kw_only=True):
    """Options of detokenization, and the stop strings."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    shown: tuple[int, ...] = ()  # special tokens that are not skipped
    min_tokens: int = 0  # stop strings are ignored within the first `min_tokens` tokens


class _IncrementalDecoder:
    """Decode one token at a time, together with the tokens before it, on which its text may depend."""

    def __init__(self, tokenizer: Tokenizer, context: list[int], params: TextParams) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = params.skip_special_tokens and not params.shown
        self._hidden = frozenset[int]()
        if params.skip_special_tokens and params.shown:
            self._hidden = _special_ids(tokenizer) - set(params.shown)
        self._ids = context
        self._num_returned = len(context)  # number of tokens in `_ids` whose text has been returned
        self._returned_text = self._text(context)  # text of these tokens

    def push(self, token: int) -> str:
        """Return the text that the token adds; empty if it ends within a character."""
        self._ids.append(token)
        text = self._text(self._ids)
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._num_returned < _MAX_HELD_TOKENS:
            return ""
        if text == self._returned_text:  # a token without text, such as a special token
            self._ids.pop()
            return ""
        return self._take_new_text(text)

    def flush(self) -> str:
        """Return the held text of an incomplete character; no token follows."""
        return self._take_new_text(self._text(self._ids)) if len(self._ids) > self._num_returned else ""

    def _take_new_text(self, text: str) -> str:
        new = text[len(self._returned_text) :] if text.startswith(self._returned_text) else self._changed_text(text)
        self._ids = self._ids[self._num_returned :]
        self._num_returned = len(self._ids)
        self._returned_text = self._text(self._ids)
        return new

    def _changed_text(self, text: str) -> str:
        """New text if the earlier text changed: the prompt's last character was completed, or pieces were merged."""
        if self._returned_text.endswith(_REPLACEMENT):
            same = takewhile(lambda pair: pair[0] == pair[1], zip(text, self._returned_text, strict=False))
            return text[sum(1 for _ in same) :]
        return self._text(self._ids[self._num_returned :])

    def _text(self, ids: list[int]) -> str:
        if self._hidden:
            ids = [token for token in ids if token not in self._hidden]
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


@lru_cache(maxsize=8)
def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token for token, entry in added.items() if entry.special)


class Detokenizer:
    """Detokenize one sequence. Text that may be the start of a stop string is held until that is decided."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] | NDArray[np.int32], params: TextParams) -> None:
        self._params = params
        context = [int(token) for token in prompt[-_CONTEXT_TOKENS:]]
        self._decoder = _IncrementalDecoder(tokenizer, context, params)
        self._held = ""  # decoded, not yet returned
        self._stops = StopStrings(params.stop)
        self._num_tokens = 0
        self.matched: str | None = None

    def push(self, token_ids: Sequence[int], *, last: bool = False, stopped: bool = False) -> str:
        """Return the new text that is final. Tokens after the stop string `matched` are ignored.

        Args:
            token_ids: the new tokens.
            last: no tokens follow, so all held text is returned.
            stopped: the last token is a stop token; it has text only with `include_stop`.
        """
        out = []
        for index, token in enumerate(token_ids):
            if self.matched is not None:
                break
            self._num_tokens += 1
            if not (stopped and index == len(token_ids) - 1) or self._params.include_stop:
                out.append(self._apply_stops(self._decoder.push(token)))
        if last and self.matched is None:
            out.append(self._apply_stops(self._decoder.flush()))
        if last and self.matched is None:
            out.append(self._held)
            self._held = ""
        return "".join(out)

    @property
    def tokens_used(self) -> int:
        """Number of decoded tokens, including the one that completed a stop string."""
        return self._num_tokens

    def _apply_stops(self, text: str) -> str:
        """Text that is final, up to a stop string that the new text completes, which sets `matched`."""
        if not self._params.stop:
            return text
        seen = len(self._held)
        self._held += text
        match = self._stops.push(text)
        if match is not None and self._num_tokens > self._params.min_tokens:
            start, self.matched = match
            stop_at = seen + start + (len(self.matched) if self._params.include_stop else 0)
            final, self._held = self._held[:stop_at], ""
            return final
        hold_from = len(self._held) - self._stops.held
        final, self._held = self._held[:hold_from], self._held[hold_from:]
        return final
