"""Liveness, readiness, version and load."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from quire import __version__
from quire.config.kv_events import KVEventsConfig
from quire.protocol.common import ErrorBody
from quire.protocol.errors import Unavailable
from quire.serving.models import ServerState

_UNHEALTHY: dict[int | str, dict[str, Any]] = {
    503: {"model": ErrorBody, "description": "not healthy, or not ready; the message says why"}
}


class Version(BaseModel):
    """The version of Quire."""

    version: str


class Load(BaseModel):
    """The number of requests that are being answered, without this one."""

    server_load: int


def probe_response(state: ServerState, path: str) -> Response:
    """The response to a probe: readiness at `/ready`, else whether all engines run and make progress."""
    if path == "/ready" and state.draining:
        reason: str | None = "The server is shutting down and finishes its running requests."
    elif path == "/ready" and state.is_sleeping:
        reason = "A model is asleep; POST /wake_up wakes it."
    elif path == "/ready" and state.is_paused:
        reason = "A model is paused; POST /resume lets it go on."
    else:
        reason = state.unhealthy_reason()
    if reason is not None:
        return Unavailable(reason).response(path)
    if degraded := state.degraded_reasons():
        return JSONResponse({"status": "degraded", "reasons": degraded})
    return Response()


def router(state: ServerState) -> APIRouter:
    """A router with the endpoints of health, readiness, load and metrics."""
    routes = APIRouter()

    @routes.head("/health", include_in_schema=False)
    @routes.head("/ping", include_in_schema=False)
    @routes.get("/health", response_class=Response, responses=_UNHEALTHY)
    @routes.get("/ping", response_class=Response, responses=_UNHEALTHY)
    @routes.post("/ping", response_class=Response, responses=_UNHEALTHY)
    async def health() -> Response:
        """Whether all engines run and make progress. The body lists other parts that do not work."""
        return probe_response(state, "/health")

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready", response_class=Response, responses=_UNHEALTHY)
    async def ready() -> Response:
        """Whether the server should get new requests."""
        return probe_response(state, "/ready")

    @routes.get("/version")
    async def version() -> Version:
        """The version of Quire."""
        return Version(version=__version__)

    @routes.get("/kv_event_sources")
    async def kv_event_sources() -> dict[int, KVEventsConfig]:
        """Where the events of the prefix cache are published (--kv-events-config), by the rank of the replica."""
        sources = [item for model in state.models for item in model.client.kv_event_sources.items()]
        return {rank: KVEventsConfig(**msgspec.to_builtins(source)) for rank, source in sources}

    @routes.get("/load")
    async def load() -> Load:
        """The number of requests that are being answered."""
        return Load(server_load=state.in_flight + await state.others.in_flight())

    return routes
