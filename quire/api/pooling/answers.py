"""Response bodies. Arrays become JSON without Python's numbers, and large bodies give way to other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from quire.api.http.errors import InvalidRequest
from quire.api.http.routing import release_resources
from quire.api.http.sse import unless_disconnected
from quire.api.pooling.arrays import base64_of, json_of, raw, shape_of
from quire.api.pooling.run import Head, Results
from quire.api.protocol.pooling.requests import EncodingFields

_AT_ONCE = 1 << 17  # bytes that are written before the event loop turns to others: about 1 ms
_MAX_DESCRIBED = 256  # inputs whose arrays are described in a header; clients have limits


async def respond(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that `work` gives, which is cancelled when the client disconnects.

    What the request holds is released as soon as `work` has ended, however slowly the client reads.

    Raises:
        ClientDisconnected: it was cancelled.
    """
    try:
        return await unless_disconnected(request, work)
    finally:
        release_resources(request)


def json_response(body: Any) -> Response:
    """A JSON body. NaN and infinite numbers become null."""
    return Response(orjson.dumps(body), media_type="application/json")


def head_fields(head: Head) -> dict[str, Any]:
    """What all lists of results begin with."""
    return {"id": head.id, "object": "list", "created": head.created, "model": head.name}


def check_encoding(body: EncodingFields, count: int) -> None:
    """Refuse formats that cannot describe so many arrays.

    Raises:
        InvalidRequest: there are too many inputs for the format.
    """
    if body.encoding_format == "bytes" and count > _MAX_DESCRIBED:
        raise InvalidRequest(
            f"`encoding_format` bytes describes at most {_MAX_DESCRIBED} inputs in a header, not {count}; "
            "use bytes_only or base64.",
            "encoding_format",
        )


async def arrays_response(head: Head, results: Results, body: EncodingFields, *, kind: str, key: str) -> Response:
    """The arrays of all inputs in the format of a request.

    Args:
        head: of the request.
        results: its arrays.
        body: its format.
        kind: `object` of each result.
        key: name of the field with the array.
    """
    dtype, endianness = body.encoding
    if body.encoding_format in ("bytes", "bytes_only"):
        return await _binary_response(head, results, body)
    if body.encoding_format == "base64":
        arrays = (base64_of(array, dtype, endianness) for array in results.arrays)
    else:
        arrays = (json_of(array, dtype) for array in results.arrays)
    template = orjson.dumps({"object": kind, "index": 0, key: 0})
    before, after, _ = template.split(b"0")
    items = (before + b"%d" % index + after + array + b"}" for index, array in enumerate(arrays))
    content = await list_body(head_fields(head), items, {"usage": results.usage().model_dump()})
    return Response(content, media_type="application/json")


async def list_body(before: Mapping[str, Any], items: Iterable[bytes], after: Mapping[str, Any]) -> bytes:
    """A JSON object with the fields of `before`, a list `data` of encoded items, and the fields of `after`."""
    head, tail = orjson.dumps(before), orjson.dumps(after)
    data = await joined(items)
    return head[:-1] + b',"data":[' + data + b"]," + tail[1:]


async def joined(items: Iterable[bytes], separator: bytes = b",") -> bytes:
    """All items. They are made here, with pauses in which other requests run."""
    parts: list[bytes] = []
    written = 0
    for item in items:
        parts.append(item)
        written += len(item)
        if written >= _AT_ONCE:
            written = 0
            await asyncio.sleep(0)
    return separator.join(parts)


async def _binary_response(head: Head, results: Results, body: EncodingFields) -> Response:
    dtype, endianness = body.encoding
    pieces = [raw(array, dtype, endianness) for array in results.arrays]
    content = b"".join(pieces)
    if body.encoding_format == "bytes_only":
        return Response(content, media_type="application/octet-stream")
    described, start = [], 0
    for index, (array, piece) in enumerate(zip(results.arrays, pieces, strict=True)):
        described.append(
            {
                "index": index,
                "embed_dtype": dtype,
                "endianness": endianness,
                "start": start,
                "end": start + len(piece),
                "shape": shape_of(array, dtype),
            }
        )
        start += len(piece)
    metadata = {**head_fields(head), "data": described, "usage": results.usage().model_dump()}
    headers = {"metadata": orjson.dumps(metadata).decode("latin-1")}
    return Response(content, headers=headers, media_type="application/octet-stream")
