"""Liveness, readiness, version and load."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import Response

from quire import __version__
from quire.api.http.errors import Unavailable
from quire.api.protocol.common import ErrorBody
from quire.api.serving.models import ServerState

_UNHEALTHY: dict[int | str, dict[str, Any]] = {
    503: {"model": ErrorBody, "description": "not healthy, or not ready; the message says why"}
}


class Version(BaseModel):
    """Which Quire this is."""

    version: str


class Load(BaseModel):
    """Requests being answered, this one left out."""

    server_load: int


def router(state: ServerState) -> APIRouter:
    """The endpoints."""
    routes = APIRouter()

    @routes.head("/health", include_in_schema=False)
    @routes.head("/ping", include_in_schema=False)
    @routes.get("/health", response_class=Response, responses=_UNHEALTHY)
    @routes.get("/ping", response_class=Response, responses=_UNHEALTHY)
    @routes.post("/ping", response_class=Response, responses=_UNHEALTHY)
    async def health() -> Response:
        """Whether every engine lives and makes progress."""
        if (reason := state.unhealthy_reason()) is not None:
            raise Unavailable(reason)
        return Response()

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready", response_class=Response, responses=_UNHEALTHY)
    async def ready() -> Response:
        """Whether new requests should come here."""
        if state.draining:
            raise Unavailable("The server is finishing its last requests.")
        return await health()

    @routes.get("/version")
    async def version() -> Version:
        """Which Quire this is."""
        return Version(version=__version__)

    @routes.get("/load")
    async def load() -> Load:
        """How busy the server is."""
        return Load(server_load=state.in_flight)

    return routes
