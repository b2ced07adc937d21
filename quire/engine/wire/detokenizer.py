"""Tokens to text as they come: incremental decoding and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile

import msgspec
from tokenizers import Tokenizer

from quire.engine.wire.partial import partial_suffix

_CONTEXT_TOKENS = 6  # enough of the prompt for a decoder that glues pieces to see what came before
_BROKEN = "\ufffd"  # decoders put it for bytes that are no character, or not yet one
_MOST_HELD = 24  # tokens that wait for a character to become complete; more are broken for good


class TextParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens become text, and where the text ends."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    shown: tuple[int, ...] = ()  # special tokens which are not skipped
    min_tokens: int = 0  # stop strings are looked for behind these


class _Decoder:
    """Text of tokens one by one. A token is decoded behind those before it, as some decoders glue pieces by them."""

    def __init__(self, tokenizer: Tokenizer, context: list[int], params: TextParams) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = params.skip_special_tokens and not params.shown
        self._hidden = frozenset[int]()
        if params.skip_special_tokens and params.shown:
            self._hidden = _special_ids(tokenizer) - set(params.shown)
        self._ids = context
        self._known = len(context)  # of `_ids`, those whose text was given out
        self._before = self._text(context)  # the text of these

    def push(self, token: int) -> str:
        """The text that the token brings; nothing if it ends within a character."""
        self._ids.append(token)
        text = self._text(self._ids)
        if text.endswith(_BROKEN) and len(self._ids) - self._known < _MOST_HELD:
            return ""
        if text == self._before:  # a token without text, as special tokens are
            self._ids.pop()
            return ""
        return self._give(text)

    def flush(self) -> str:
        """What is held of a character that will never be complete."""
        return self._give(self._text(self._ids)) if len(self._ids) > self._known else ""

    def _give(self, text: str) -> str:
        new = text[len(self._before) :] if text.startswith(self._before) else self._rewritten(text)
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        self._before = self._text(self._ids)
        return new

    def _rewritten(self, text: str) -> str:
        """New text where the text before has changed: the prompt's last character is complete now, or pieces merged."""
        if self._before.endswith(_BROKEN):
            kept = takewhile(lambda pair: pair[0] == pair[1], zip(text, self._before, strict=False))
            return text[sum(1 for _ in kept) :]
        return self._text(self._ids[self._known :])

    def _text(self, ids: list[int]) -> str:
        if self._hidden:
            ids = [token for token in ids if token not in self._hidden]
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


@lru_cache(maxsize=8)
def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token for token, entry in added.items() if entry.special)


class Detokenizer:
    """Text of one sequence. Text that may be the start of a stop string is held back until that is decided."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: TextParams) -> None:
        self._params = params
        context = [int(token) for token in prompt[-_CONTEXT_TOKENS:]]
        self._decoder = _Decoder(tokenizer, context, params)
        self._held = ""  # decoded, not yet given out
        self._longest_stop = max((len(stop) for stop in params.stop), default=0)
        self._count = 0
        self.matched: str | None = None

    def push(self, token_ids: Sequence[int], *, last: bool = False, stopped: bool = False) -> str:
        """New text that is certain. After the stop string `matched`, further tokens give nothing.

        Args:
            token_ids: what came.
            last: nothing follows, so all text is given out.
            stopped: the last of the tokens ended the sequence, so it has text only where stops are included.
        """
        out = []
        for index, token in enumerate(token_ids):
            if self.matched is not None:
                break
            self._count += 1
            if not (stopped and index == len(token_ids) - 1) or self._params.include_stop:
                out.append(self._take(self._decoder.push(token)))
        if last and self.matched is None:
            out.append(self._take(self._decoder.flush()))
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
        cut = len(self._held) - partial_suffix(self._held, self._params.stop, self._longest_stop)
        given, self._held = self._held[:cut], self._held[cut:]
        return given

    def _find_stop(self, seen: int) -> int | None:
        """Where the text ends, if a stop string ends in what is new; the earliest match wins."""
        found = [
            (at, stop) for stop in self._params.stop if (at := self._held.find(stop, max(0, seen - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        at, self.matched = min(found)
        return at + len(self.matched) if self._params.include_stop else at
