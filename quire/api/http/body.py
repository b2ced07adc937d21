"""Reads JSON bodies strictly: said to be JSON, no NaN, no lone surrogates, no bottomless nesting."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import orjson
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from quire.api.http.errors import InvalidRequest

Body = TypeVar("Body", bound=BaseModel)
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class _StrictRequest(Request):
    async def json(self) -> Any:
        """The body, by orjson, which also takes a third of the time."""
        return orjson.loads(await self.body())


class StrictRoute(APIRoute):
    """A route whose body is read strictly."""

    def get_route_handler(self) -> Handler:
        """The usual handler around a stricter request."""
        handle = super().get_route_handler()
        takes_body = self.body_field is not None

        async def strict(request: Request) -> Response:
            if takes_body:
                _check_media_type(request)
            return await handle(_StrictRequest(request.scope, request.receive))

        return strict


def request_of(kind: type[Body], fields: Mapping[str, Any]) -> Body:
    """A request to one endpoint, made of what another was asked.

    Raises:
        InvalidRequest: a field is not good there.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequest("; ".join(str(problem["msg"]) for problem in error.errors())) from error


def _check_media_type(request: Request) -> None:
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != "application/json":
        raise InvalidRequest("Unsupported Media Type: Only 'application/json' is allowed")
