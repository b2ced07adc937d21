"""Response bodies. Arrays become JSON without creating Python floats, while the body is sent."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import chain
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from quire.api.http.routing import enter_for_request, release_resources
from quire.api.http.sse import unless_disconnected
from quire.api.http.streamed_body import response_of
from quire.api.pooling.arrays import base64_of, byte_size, json_of, shape_of, to_bytes
from quire.api.pooling.run import PoolingContext, PoolingResults
from quire.protocol.errors import InvalidRequest
from quire.protocol.pooling.requests import EncodingFields

_MAX_DESCRIBED = 256  # inputs whose arrays are described in a header; clients have limits


async def respond(request: Request, context: PoolingContext, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that `work` gives, which is cancelled when the client disconnects.

    What the request holds is released as soon as `work` has ended, however slowly the client reads; only its results
    are held until they have been read.

    Raises:
        ClientDisconnected: it was cancelled.
    """
    try:
        response = await unless_disconnected(request, work)
    except BaseException:
        context.results.close()
        raise
    finally:
        release_resources(request)
    enter_for_request(request, closing(context.results))
    return response


def context_fields(context: PoolingContext) -> dict[str, Any]:
    """The beginning of all lists of results."""
    return {"id": context.id, "object": "list", "created": context.created, "model": context.name}


def check_encoding(body: EncodingFields, count: int) -> None:
    """Refuse formats that do not support this number of arrays.

    Raises:
        InvalidRequest: there are too many inputs for the format.
    """
    if body.encoding_format == "bytes" and count > _MAX_DESCRIBED:
        raise InvalidRequest(
            f"`encoding_format: bytes` accepts at most {_MAX_DESCRIBED} inputs, not {count}, because a header "
            "describes each; use bytes_only or base64.",
            "encoding_format",
        )


def arrays_response(
    context: PoolingContext, results: PoolingResults, body: EncodingFields, *, kind: str, key: str
) -> Response:
    """The arrays of all inputs in the format of a request.

    Args:
        context: context of the request.
        results: arrays of the request.
        body: selects the format.
        kind: `object` of each result.
        key: name of the field with the array.
    """
    dtype, endianness = body.encoding
    if body.encoding_format in ("bytes", "bytes_only"):
        return _binary_response(context, results, body)
    if body.encoding_format == "base64":
        arrays = (base64_of(array, dtype, endianness) for array in results.arrays)
    else:
        arrays = (json_of(array, dtype) for array in results.arrays)
    template = orjson.dumps({"object": kind, "index": 0, key: 0})
    before, after, _ = template.split(b"0")
    items = (chain((before + b"%d" % index + after,), array, (b"}",)) for index, array in enumerate(arrays))
    return response_of(list_body(context_fields(context), "data", items, {"usage": results.usage().model_dump()}))


def list_body(
    before: Mapping[str, Any], name: str, items: Iterable[Iterable[bytes]], after: Mapping[str, Any]
) -> Iterator[bytes]:
    """A JSON object with the fields of `before`, a list of this name, and the fields of `after`, in pieces."""
    yield orjson.dumps(before)[:-1] + b"," + orjson.dumps(name) + b":"
    yield from list_of(items)
    yield b"," + orjson.dumps(after)[1:]


def list_of(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """A JSON list of encoded items, each of which is in pieces."""
    separator = b"["
    for item in items:
        yield separator
        yield from item
        separator = b","
    yield b"]" if separator == b"," else b"[]"


def encode_values(items: Iterable[Any]) -> Iterator[tuple[bytes]]:
    """Values as items of `list_of`. NaN and infinite numbers become null."""
    return ((orjson.dumps(item),) for item in items)


def _binary_response(context: PoolingContext, results: PoolingResults, body: EncodingFields) -> Response:
    dtype, endianness = body.encoding
    content = (piece for array in results.arrays for piece in to_bytes(array, dtype, endianness))
    if body.encoding_format == "bytes_only":
        return response_of(content, "application/octet-stream")
    described = []
    start = 0
    for index, array in enumerate(results.arrays):
        end = start + byte_size(array, dtype)
        described.append(
            {
                "index": index,
                "embed_dtype": dtype,
                "endianness": endianness,
                "start": start,
                "end": end,
                "shape": shape_of(array, dtype),
            }
        )
        start = end
    metadata = {**context_fields(context), "data": described, "usage": results.usage().model_dump()}
    return response_of(content, "application/octet-stream", {"metadata": orjson.dumps(metadata).decode("latin-1")})
