"""Sleep and wake-up of all models, as vLLM has them: their memory is freed while the server is not used."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from quire.api.http.sse import unless_disconnected
from quire.engine.client.protocol import MemoryTag, SleepLevel
from quire.engine.client.records import SleepOperation
from quire.protocol.common import ErrorBody
from quire.protocol.errors import Conflict, InvalidRequest
from quire.serving.models import ServedModel, ServerState, each_model

_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "the server runs without --enable-sleep-mode, or a parameter is wrong"},
    409: {"model": ErrorBody, "description": "a model is paused, so that its requests do not end"},
    503: {"model": ErrorBody, "description": "a model could not fall asleep or wake up; the message says why"},
}
_ALL: tuple[MemoryTag, ...] = ("weights", "kv_cache")


class Sleeping(BaseModel):
    """Whether a model sleeps, in whole or in part."""

    is_sleeping: bool


def router(state: ServerState) -> APIRouter:
    """A router with the endpoints of sleep."""
    routes = APIRouter()

    @routes.post("/sleep", response_class=Response, responses=_ERRORS)
    async def sleep(
        request: Request,
        level: Annotated[int, Query(ge=1, le=2)] = 1,
        mode: Annotated[Literal["abort", "wait"], Query()] = "abort",
    ) -> Response:
        """Free the memory of weights and KV caches of all models.

        Level 1 keeps the weights in the memory of the host, level 2 drops them. Running requests are aborted, or with
        the mode "wait" finished first, however long they take; a client that disconnects ends that wait. Answers when
        the memory is free.
        """
        _require_sleep_mode(state)
        if mode == "wait" and state.is_paused:
            raise Conflict("A model is paused, so that its requests do not end: POST /resume first, or abort them.")
        sleep_level = cast("SleepLevel", level)
        wait = mode == "wait"
        changes = each_model(
            _observed(model, "sleep", model.client.sleeping.sleep(sleep_level, wait=wait)) for model in state.models
        )
        await (unless_disconnected(request, changes) if wait else changes)
        return Response()

    @routes.post("/wake_up", response_class=Response, responses=_ERRORS)
    async def wake_up(tags: Annotated[list[MemoryTag], Query()] = []) -> Response:  # noqa: B006 FastAPI copies it
        """Restore the memory of all models, or of these tags only. Answers when that is done."""
        _require_sleep_mode(state)
        await each_model(
            _observed(model, "wake", model.client.sleeping.wake_up(tags or _ALL)) for model in state.models
        )
        return Response()

    @routes.get("/is_sleeping")
    async def is_sleeping() -> Sleeping:
        """Whether a model sleeps, in whole or in part."""
        return Sleeping(is_sleeping=state.is_sleeping)

    return routes


def _require_sleep_mode(state: ServerState) -> None:
    if not state.sleep_mode:
        raise InvalidRequest("The server was started without --enable-sleep-mode, which /sleep and /wake_up need.")


async def _observed(model: ServedModel, operation: SleepOperation, change: Coroutine[Any, Any, None]) -> None:
    with model.client.observers.sleep_operation(operation):
        await change
