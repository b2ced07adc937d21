"""Formats log-probabilities for chat, completions and prompts."""

from __future__ import annotations

import asyncio
import codecs
import copy
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import orjson

from quire.engine.client.protocol import TokenLogprobs
from quire.rendering.tokenizer import Tokenizer
from quire.workers.tenant import take_turn

_MIN_LOGPROB = -9999.0  # JSON has no minus infinity
_MAX_CANDIDATES = 512  # formatted without giving way to the event loop; they take a millisecond
_MAX_IN_LOOP = 4096  # of one entry; more are formatted in a thread
P = ParamSpec("P")
Formatted = TypeVar("Formatted")
Entry = TypeVar("Entry", TokenLogprobs, TokenLogprobs | None)


class TextPosition:
    """Offset of the next token in a text. A character made of several tokens is counted after the last of them."""

    def __init__(self) -> None:
        self.characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __copy__(self) -> TextPosition:
        other = TextPosition()
        other.characters = self.characters
        other._decoder.setstate(self._decoder.getstate())
        return other

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

    def chat_with_itself(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Items as of `chat`, whose `top_logprobs` begin with the token itself."""
        return [
            {**self._candidate(entry, 0), "top_logprobs": [self._candidate(entry, i) for i in _distinct(entry)]}
            for entry in entries
        ]

    def by_id(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Items with ids in place of texts, whose `top_logprobs` begin with the token itself."""
        return [
            {**_numbers(entry, 0), "top_logprobs": [_numbers(entry, i) for i in _distinct(entry)]} for entry in entries
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


def _distinct(entry: TokenLogprobs) -> list[int]:
    """Indices of the different tokens of an entry."""
    tokens = entry.token_ids
    return [0, *(i for i in range(1, len(tokens)) if tokens[i] != tokens[0])]


def _numbers(entry: TokenLogprobs, index: int) -> dict[str, Any]:
    rank = entry.ranks[index]
    return {"token_id": entry.token_ids[index], "logprob": _finite(entry.logprobs[index]), "rank": rank or None}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _MIN_LOGPROB


class CompletionLogprobColumns:
    """The columns of a completion choice's `logprobs` as JSON, made piece by piece."""

    _NAMES = ("text_offset", "token_logprobs", "tokens", "top_logprobs")

    def __init__(self, formatter: LogprobFormatter, position: TextPosition) -> None:
        """`position`: position in the text of the choice; it advances with each piece."""
        self._formatter = formatter
        self._position = position
        self._pieces: dict[str, list[bytes]] = {name: [] for name in self._NAMES}

    def __copy__(self) -> CompletionLogprobColumns:
        other = CompletionLogprobColumns(self._formatter, copy.copy(self._position))
        other._pieces = {name: [*pieces] for name, pieces in self._pieces.items()}
        return other

    async def extend(self, entries: Sequence[TokenLogprobs | None], tokens: Sequence[int]) -> None:
        """Append tokens in slices, between which the event loop runs."""
        start = 0
        async for part in _slices(entries):
            columns = await _unblocked(
                part, self._formatter.completion, part, tokens[start : start + len(part)], self._position
            )
            for name, pieces in self._pieces.items():
                pieces.append(_items(columns[name]))
            start += len(part)

    def json(self) -> orjson.Fragment:
        """The columns so far."""
        return orjson.Fragment(orjson.dumps({name: _joined(pieces) for name, pieces in self._pieces.items()}))


async def encode_entries(
    entries: Sequence[Entry], format_entries: Callable[[Sequence[Entry]], list[Any]]
) -> orjson.Fragment:
    """Formatted entries as a JSON array, made in slices between which the event loop runs."""
    return _joined([_items(await _unblocked(part, format_entries, part)) async for part in _slices(entries)])


async def _unblocked(
    part: Sequence[TokenLogprobs | None], call: Callable[P, Formatted], *args: P.args, **kwargs: P.kwargs
) -> Formatted:
    """The result of a call that formats a part; in a thread if one entry has too many candidates for the event loop."""
    if any(len(entry.token_ids) > _MAX_IN_LOOP for entry in part[:2] if entry is not None):
        return await asyncio.to_thread(call, *args, **kwargs)
    return call(*args, **kwargs)


async def _slices(entries: Sequence[Entry]) -> AsyncIterator[Sequence[Entry]]:
    """Consecutive slices of the entries, with `_MAX_CANDIDATES` candidates each."""
    width = max((len(entry.token_ids) for entry in entries[:2] if entry is not None), default=1)
    step = max(1, _MAX_CANDIDATES // width)
    for start in range(0, len(entries), step):
        if len(entries) > step:
            await take_turn()
        yield entries[start : start + step]


def _items(values: list[Any]) -> bytes:
    """The items of a JSON array."""
    return orjson.dumps(values)[1:-1]


def _joined(pieces: Sequence[bytes]) -> orjson.Fragment:
    return orjson.Fragment(b"[" + b",".join(pieces) + b"]")
