"""Prefixes of requests: what a proxy, which has no tokenizer, can say about the beginning of a prompt.

The text of a prompt is cut into pieces of equal size. Each piece has a hash of itself and all pieces before it, as KV
blocks have. Two requests whose hashes begin alike have prompts that begin alike.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson
import xxhash

PIECE = 256  # bytes, about 64 tokens
MAX_PIECES = 4096  # of a request
_PROMPTS = ("prompt", "input", "inputs", "query", "text")  # fields that hold a prompt without messages
_BEFORE_MESSAGES = ("tools", "instructions", "system")  # fields that chat templates put in front
_BEGINNING = ("model", "cache_salt", "chat_template")  # nothing is shared by requests that differ in them


def prefix_hashes(body: bytes) -> list[int]:
    """Return the hashes of the pieces of a request's prompt; none if the body is not that of a request with a prompt.

    The body is not checked: whoever answers the request does.
    """
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError:
        return []
    if not isinstance(request, dict):
        return []
    text = b"".join(_within(_pieces_of(request), PIECE * MAX_PIECES))
    previous = xxhash.xxh3_64_intdigest(orjson.dumps([request.get(name) for name in _BEGINNING]))
    hashes = []
    for begin in range(0, len(text) - PIECE + 1, PIECE):
        previous = xxhash.xxh3_64_intdigest(text[begin : begin + PIECE], previous)
        hashes.append(previous)
    return hashes


def _pieces_of(request: Mapping[str, Any]) -> Iterator[bytes]:
    """The parts of a prompt in the order in which they stand in it."""
    for name in _BEFORE_MESSAGES:
        if request.get(name):
            yield orjson.dumps(request[name])
    messages = request.get("messages")
    if not isinstance(messages, list):
        messages = next((request[name] for name in _PROMPTS if request.get(name)), None)
        if isinstance(messages, str):
            yield messages.encode(errors="surrogatepass")
            return
    if isinstance(messages, list):
        for message in messages:
            yield orjson.dumps(message, option=orjson.OPT_SORT_KEYS)
    elif messages is not None:
        yield orjson.dumps(messages)


def _within(parts: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Parts up to a size."""
    for part in parts:
        yield part[:size]
        size -= len(part)
        if size <= 0:
            return


def packed(hashes: Iterable[int]) -> bytes:
    """Return hashes in 8 bytes each."""
    return array("Q", hashes).tobytes()


def unpacked(content: bytes) -> list[int]:
    """Return the hashes that `packed` has packed."""
    return array("Q", content).tolist()
