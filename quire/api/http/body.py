"""Strict JSON: the content type must be JSON, and NaN, lone surrogates and very deep nesting are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from quire.api.http.errors import InvalidRequest, field_path
from quire.api.http.json_size import check_number_of_values, load_json
from quire.api.http.tenant import take_turn

RELEASE_BODY = "quire.release_body"  # scope key of a function: the bytes of the body are not held any more
Body = TypeVar("Body", bound=BaseModel)
# Levels of nested arrays and objects. What a response, an event or a grammar adds around a part of the request keeps it
# below the limits of orjson and pydantic.
MAX_DEPTH = 200
_LARGE = 1 << 20  # bytes
_ORJSON_DEPTH = 254  # levels that orjson serializes


class NestedTooDeeply(ValueError):
    """A JSON value has more than `MAX_DEPTH` levels of nested arrays and objects."""

    def __init__(self) -> None:
        super().__init__(f"Arrays and objects may be nested at most {MAX_DEPTH} levels deep.")


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
            value = _load(content)
            if (_containers(content) if containers is None else containers) > MAX_DEPTH:
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


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON text.

    Raises:
        NestedTooDeeply: it has more than `MAX_DEPTH` levels.
        orjson.JSONDecodeError: it is not valid JSON.
    """
    value = _load(content)
    if _containers(content) > MAX_DEPTH:
        check_depth(value)
    return value


def _containers(content: bytes | str) -> int:
    """An upper bound of the number of arrays and objects."""
    brackets = (b"[", b"{") if isinstance(content, bytes) else ("[", "{")
    return sum(map(content.count, brackets))  # type: ignore[arg-type]  # the same type as the content


def _load(content: bytes | str) -> Any:
    try:
        return load_json(content)
    except orjson.JSONDecodeError as error:
        if "limit exceeded" in error.msg:  # more than 1,024 levels
            raise NestedTooDeeply from error
        raise


async def _give_way(content: bytes) -> None:
    """Let other requests run between two passes over a large body, each of which takes tens of milliseconds."""
    if len(content) > _LARGE:
        await take_turn()


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


def check_media_type(request: Request) -> None:
    """Refuse bodies that are not declared as JSON.

    Raises:
        InvalidRequest: the Content-Type header is missing or different.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequest("Unsupported Media Type: Only 'application/json' is allowed")


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
