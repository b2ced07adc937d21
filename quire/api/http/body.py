"""Bodies of requests: the content type must be JSON, which is parsed strictly, a bounded number of values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from quire.api.http.error_handlers import field_path
from quire.protocol.errors import InvalidRequest, shorten
from quire.protocol.strict_json import (
    MAX_DEPTH,
    NestedTooDeeply,
    check_depth,
    check_number_of_values,
    count_containers,
    load_strictly,
)
from quire.workers.tenant import take_turn

RELEASE_BODY = "quire.release_body"  # scope key of a function: the bytes of the body are not held any more
Body = TypeVar("Body", bound=BaseModel)
_LARGE = 1 << 20  # bytes


class JsonRequest(Request):
    """A request whose body is parsed by orjson, which is strict and three times as fast as the standard library."""

    async def json(self) -> Any:
        """The parsed body.

        Raises:
            InvalidRequest: it has too many values, or is nested too deeply.
            orjson.JSONDecodeError: it is not valid JSON.
        """
        content = await self.body()
        self.app.state.malloc_trimmer.received(len(content))
        containers = await check_number_of_values(content, self.app.state.max_json_values)
        await _give_way(content)
        try:
            value = load_strictly(content)
            if (count_containers(content) if containers is None else containers) > MAX_DEPTH:
                await _give_way(content)
                check_depth(value)
        except NestedTooDeeply as error:
            raise InvalidRequest(str(error), _deepest_field(content)) from error
        await _give_way(content)
        return value

    def drop_body(self) -> None:
        """Free the body, which has been parsed."""
        self._body = b""
        release_body(self)


def release_body(request: Request) -> None:
    """Say that a body has been parsed, and makes room for others that arrive."""
    request.scope.get(RELEASE_BODY, _nothing)()


def _nothing() -> None:
    pass


async def _give_way(content: bytes) -> None:
    """Let other requests run between two passes over a large body, each of which takes tens of milliseconds."""
    if len(content) > _LARGE:
        await take_turn()


def check_media_type(request: Request) -> None:
    """Refuse bodies that are not declared as JSON, or are compressed.

    Raises:
        InvalidRequest: the Content-Type header is missing or different, or there is a Content-Encoding.
    """
    check_encoding(request)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequest("Unsupported Media Type: Only 'application/json' is allowed")


def check_encoding(request: Request) -> None:
    """Refuse compressed bodies, whose bytes would only be said to be invalid.

    Raises:
        InvalidRequest: the body has an encoding.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise InvalidRequest(
            f"Bodies with the Content-Encoding {shorten(encoding)!r} are not supported: send the body uncompressed."
        )


def request_of(kind: type[Body], fields: Mapping[str, Any]) -> Body:
    """The body of one endpoint's request, built from a request to another endpoint.

    Raises:
        InvalidRequest: a field is not valid for that endpoint.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        problems = error.errors(include_input=False)
        raise InvalidRequest(
            "; ".join(str(problem["msg"]) for problem in problems), field_path(problems[0], fields)
        ) from error


def _deepest_field(content: bytes) -> str | None:
    """Name of the first field of a body that is nested too deeply; None if orjson cannot parse it."""
    try:
        fields = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    for name, value in fields.items() if isinstance(fields, dict) else ():
        try:
            check_depth([value])
        except NestedTooDeeply:
            return str(name)
    return None
