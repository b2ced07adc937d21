"""Strict JSON: a bounded number of values and levels; NaN and lone surrogates are refused.

The event loop waits for the parser. What a byte costs differs: `[]` becomes an object of 56 bytes, text remains text.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from quire.protocol.errors import InvalidRequest

_SMALL = 1 << 18  # bytes; a body of this size has fewer values than any limit
_CHUNK = 1 << 20  # bytes that are scanned at a time
_SHARE = 8  # an array, an object or a key costs about as much as so many numbers
_STRING_SHARE = 4  # and a string as so many; keys are strings as well
# Levels of nested arrays and objects. What a response, an event or a grammar adds around a part of the request keeps it
# below the limits of orjson and pydantic.
MAX_DEPTH = 200
_ORJSON_DEPTH = 254  # levels that orjson serializes
_QUOTE, _BACKSLASH, _COMMA, _COLON, _BRACKET, _BRACE = b'"\\,:[{'


class NestedTooDeeply(ValueError):
    """A JSON value has more than `MAX_DEPTH` levels of nested arrays and objects."""

    def __init__(self) -> None:
        super().__init__(f"Arrays and objects may be nested at most {MAX_DEPTH} levels deep.")


async def check_number_of_values(body: bytes, maximum: int) -> int | None:
    """Refuse a body with too many values.

    Args:
        body: JSON, valid or not.
        maximum: number of values. Arrays, objects and keys may be an eighth as many, strings a quarter.

    Returns:
        An upper bound of the number of its arrays, objects and keys; None for a small body, which is not counted.

    Raises:
        InvalidRequest: it has more.
    """
    if len(body) <= min(_SMALL, maximum):
        return None
    values, containers, strings = await asyncio.to_thread(count_values, body, maximum)  # NumPy releases the GIL
    if values > maximum:
        raise InvalidRequest(f"The body has more than {maximum} JSON values, the limit of --max-json-values.")
    if containers > maximum // _SHARE:
        raise InvalidRequest(
            f"The body has more than {maximum // _SHARE} JSON arrays, objects and keys, an eighth of --max-json-values."
        )
    if strings > maximum // _STRING_SHARE:
        raise InvalidRequest(
            f"The body has more than {maximum // _STRING_SHARE} JSON strings, a quarter of --max-json-values."
        )
    return containers


def load_json(content: bytes | str) -> Any:
    """The value of a JSON text; raises `orjson.JSONDecodeError`.

    The garbage collector would search all objects of the process again and again while thousands of lists are made.
    """
    enabled = gc.isenabled()
    gc.disable()  # the GIL is held until it is enabled again
    try:
        return orjson.loads(content)
    finally:
        if enabled:
            gc.enable()


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON text.

    Raises:
        NestedTooDeeply: it has more than `MAX_DEPTH` levels.
        orjson.JSONDecodeError: it is not valid JSON.
    """
    value = load_strictly(content)
    if count_containers(content) > MAX_DEPTH:
        check_depth(value)
    return value


def count_containers(content: bytes | str) -> int:
    """An upper bound of the number of arrays and objects."""
    brackets = (b"[", b"{") if isinstance(content, bytes) else ("[", "{")
    return sum(map(content.count, brackets))  # type: ignore[arg-type]  # the same type as the content


def load_strictly(content: bytes | str) -> Any:
    """The value of a JSON text of at most 1,024 levels.

    Raises:
        NestedTooDeeply: it has more.
        orjson.JSONDecodeError: it is not valid JSON.
    """
    try:
        return load_json(content)
    except orjson.JSONDecodeError as error:
        if "limit exceeded" in error.msg:  # more than 1,024 levels
            raise NestedTooDeeply from error
        raise


def check_depth(value: Any) -> None:
    """Check that a JSON value can be serialized, also as a part of a response.

    Raises:
        NestedTooDeeply: it has more than `MAX_DEPTH` levels.
    """
    for _ in range(_ORJSON_DEPTH - MAX_DEPTH):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise NestedTooDeeply from error


def count_values(body: bytes, maximum: int) -> tuple[int, int, int]:
    """Upper bounds of the number of values in a JSON text, of its arrays, objects and keys, and of its strings.

    Counting ends when a number exceeds its share of `maximum`.
    """
    values, containers, quotes = 1, 0, 0
    in_string, carried = False, b""
    for start in range(0, len(body), _CHUNK):
        if in_string and not carried and _has_no_end(body, start, start + _CHUNK):
            continue  # most chunks of a file in base64
        chunk = np.frombuffer(carried + body[start : start + _CHUNK], np.uint8)
        is_quote = chunk == _QUOTE
        escaped, ends_escaping = _escaped(chunk)
        is_quote[escaped] = False
        inside = (np.cumsum(is_quote, dtype=np.uint8) & 1).astype(np.bool_) ^ in_string
        outside = chunk[~inside]
        opened = _count(outside, _BRACKET) + _count(outside, _BRACE)
        values += _count(outside, _COMMA) + opened
        containers += _count(outside, _COLON) + opened
        quotes += int(np.count_nonzero(is_quote))
        if values > maximum or containers > maximum // _SHARE or quotes // 2 > maximum // _STRING_SHARE:
            break
        in_string, carried = bool(inside[-1]), b"\\" if ends_escaping else b""
    return values, containers, (quotes + 1) // 2


def _has_no_end(body: bytes, start: int, end: int) -> bool:
    """Whether a part of a string cannot have its end."""
    return body.find(b'"', start, end) < 0 and body.find(b"\\", start, end) < 0


def _count(text: NDArray[np.uint8], char: int) -> int:
    return int(np.count_nonzero(text == char))


def _escaped(chunk: NDArray[np.uint8]) -> tuple[NDArray[np.intp], bool]:
    """Indices of characters after an odd number of backslashes, and whether the chunk ends with such a number."""
    at = np.flatnonzero(chunk == _BACKSLASH)
    if not len(at):
        return at, False
    first = np.flatnonzero(np.diff(at, prepend=-2) > 1)  # of each run of backslashes
    starts, ends = at[first], at[np.append(first[1:] - 1, len(at) - 1)]
    after = ends[(ends - starts) % 2 == 0] + 1
    return after[after < len(chunk)], bool(len(after) and after[-1] == len(chunk))
