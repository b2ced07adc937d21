"""Reads JSON bodies strictly: said to be JSON, no NaN, no lone surrogates, no bottomless nesting."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from quire.api.errors import InvalidRequest

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


def _check_media_type(request: Request) -> None:
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != "application/json":
        raise InvalidRequest("Unsupported Media Type: Only 'application/json' is allowed")
