"""Endpoints of operators, as vLLM has them: caches are reset, engines pause, weights are replaced, steps profiled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from quire.api.http.routing import CheckedRoute
from quire.api.http.sse import unless_disconnected
from quire.engine.client.commands import BegunPause, PauseMode
from quire.engine.client.errors import DrainTimedOut, RequestRefused
from quire.protocol.common import ERRORS, ErrorBody
from quire.protocol.errors import InvalidRequest, PermissionDenied, TimedOut, shorten
from quire.protocol.operation import (
    Paused,
    PauseStatus,
    ReplicaList,
    ReplicaStatus,
    Scaled,
    ScaleRequest,
    ScalingStatus,
    UpdateWeightsFromDiskRequest,
    UpdateWeightsFromDiskResponse,
    UpdateWeightsRequest,
    UpdateWeightsResponse,
)
from quire.serving.models import ServedModel, ServerState, each_model

_ERRORS: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    409: {"model": ErrorBody, "description": "the state of an engine does not allow it now; the message says why"},
}
ModelName = Annotated[str | None, Query(description="name of a model; default: all models")]


def router(state: ServerState) -> APIRouter:
    """A router with the endpoints of operators, but for those of sleep."""
    routes = APIRouter(route_class=CheckedRoute, responses=_ERRORS)
    _add_caches(routes, state)
    _add_pauses(routes, state)
    _add_weights(routes, state)
    _add_profiles(routes, state)
    _add_replicas(routes, state)
    return routes


def _add_caches(routes: APIRouter, state: ServerState) -> None:
    @routes.post("/reset_prefix_cache", response_class=Response)
    async def reset_prefix_cache(
        reset_running_requests: bool = False,
        reset_external: bool = False,
        model: ModelName = None,
    ) -> Response:
        """Let later requests find no KV blocks of earlier ones.

        Running requests keep their blocks, which later ones do not find; with `reset_running_requests` they compute
        their tokens anew. What --kv-offloading-size and --kv-offloading-disk-size keep stays, unless
        `reset_external` is true.
        """
        models = _models(state, model)
        preempt, external = reset_running_requests, reset_external
        await each_model(each.client.commands.reset_prefix_cache(preempt=preempt, external=external) for each in models)
        return Response()

    @routes.post("/reset_encoder_cache", response_class=Response)
    async def reset_encoder_cache(model: ModelName = None) -> Response:
        """Let audio, pictures and videos be encoded anew."""
        await each_model(each.client.commands.reset_encoder_cache() for each in _models(state, model))
        return Response()

    @routes.post("/reset_mm_cache", response_class=Response)
    async def reset_mm_cache(model: ModelName = None) -> Response:
        """Let pictures and videos be read and prepared anew."""
        for each in _models(state, model):
            each.reset_media_cache()
        await state.others.reset_media_caches()
        return Response()


def _add_pauses(routes: APIRouter, state: ServerState) -> None:
    @routes.post("/pause")
    async def pause(
        request: Request,
        mode: Annotated[PauseMode, Query()] = "abort",
        wait_for_inflight_requests: bool = False,
        clear_cache: bool = True,
        model: ModelName = None,
    ) -> PauseStatus:
        """Run no more steps until /resume; new requests wait.

        Requests that have begun are aborted, or with the mode "wait" end first, however long they take, or with "keep"
        wait and go on after /resume. A client that disconnects ends the wait for their end, and nothing is paused.
        `clear_cache`: afterwards the caches are empty; not with "keep".
        """
        chosen: PauseMode = "wait" if wait_for_inflight_requests else mode
        pauses = _pause(state, _models(state, model), chosen, clear_cache=clear_cache)
        await (unless_disconnected(request, pauses) if chosen == "wait" else pauses)
        return PauseStatus(status="paused")

    @routes.post("/resume")
    async def resume(model: ModelName = None) -> PauseStatus:
        """Run steps again."""
        await each_model(each.client.commands.resume() for each in _models(state, model))
        return PauseStatus(status="resumed")

    @routes.get("/is_paused")
    async def is_paused(model: ModelName = None) -> Paused:
        """Whether a model is paused, or will be once requests that have begun have ended."""
        return Paused(is_paused=any(each.client.commands.is_paused for each in _models(state, model)))


def _add_weights(routes: APIRouter, state: ServerState) -> None:
    @routes.post("/update_weights")
    async def update_weights(body: UpdateWeightsRequest, request: Request) -> UpdateWeightsResponse:
        """Replace the weights of a model by those in a directory, which have the same names, shapes and types.

        All of them are checked before the first is replaced. Caches are empty afterwards. A client that disconnects
        ends the wait for running requests to end.
        """
        model = state.model(body.model)
        await _update(request, state, model, body.path, body.mode, "path")
        return UpdateWeightsResponse(message=_replaced(model))

    @routes.post("/update_weights_from_disk")
    async def update_weights_from_disk(
        body: UpdateWeightsFromDiskRequest, request: Request
    ) -> UpdateWeightsFromDiskResponse:
        """Replace the weights of a model by those in a directory, in SGLang's API."""
        model = state.model(body.model)
        mode: PauseMode = "abort" if body.abort_all_requests else "wait"
        await _update(request, state, model, body.model_path, mode, "model_path")
        return UpdateWeightsFromDiskResponse(message=_replaced(model))


async def _update(
    request: Request, state: ServerState, model: ServedModel, path: str, mode: PauseMode, param: str
) -> None:
    """Replace the weights of a model. `param`: the field that has the path."""
    folder = await asyncio.to_thread(_update_folder, state.weight_update_path, path, param)
    try:
        await unless_disconnected(request, model.client.commands.update_weights(folder, mode))
    except RequestRefused as error:
        raise InvalidRequest(f"The weights were not replaced: {error}", param) from error


def _replaced(model: ServedModel) -> str:
    return f"The weights of {model.names[0]} were replaced."


def _add_profiles(routes: APIRouter, state: ServerState) -> None:
    @routes.post("/start_profile", response_class=Response)
    async def start_profile(model: str | None = None) -> Response:
        """Record the steps of a model with torch's profiler, by default of the first model."""
        _require_profiler(state)
        await state.model(model).client.commands.start_profile()
        return Response()

    @routes.post("/stop_profile", response_class=Response)
    async def stop_profile(model: str | None = None) -> Response:
        """Write what was recorded; answers when the file is complete."""
        _require_profiler(state)
        await state.model(model).client.commands.stop_profile()
        return Response()


def _add_replicas(routes: APIRouter, state: ServerState) -> None:
    @routes.post(
        "/scale_elastic_ep", responses={408: {"model": ErrorBody, "description": "requests have not ended in time"}}
    )
    async def scale(body: ScaleRequest, request: Request) -> Scaled:
        """Change the number of replicas while they work. Answers when that is done.

        New ones get requests once they are loaded. Those with the highest ranks are removed, after their requests have
        ended; if these do not end in time, or the client disconnects before they have, all go on.
        """
        scaling = state.models[0].scaling
        if scaling is None:
            raise InvalidRequest(
                "The server was started with one engine, which is no replica: --data-parallel-size or "
                "--enable-elastic-ep makes it one of a set."
            )
        try:
            await unless_disconnected(request, scaling.scale(body.new_data_parallel_size, body.drain_timeout))
        except DrainTimedOut as error:
            raise TimedOut(str(error)) from error
        return Scaled(message=f"Scaled to {body.new_data_parallel_size} data parallel engines")

    @routes.post("/is_scaling_elastic_ep")
    async def is_scaling() -> ScalingStatus:
        """Whether the number of replicas is being changed."""
        sets = [model.scaling for model in state.models if model.scaling is not None]
        return ScalingStatus(is_scaling_elastic_ep=any(scaling.is_scaling for scaling in sets))

    @routes.get("/replicas")
    async def replicas() -> ReplicaList:
        """The replicas of each model that has some, and what they have to do."""
        return ReplicaList(
            data=[
                ReplicaStatus(
                    model=model.names[0],
                    engine=replica.rank,
                    state=replica.state,
                    requests=replica.load.requests,
                    tokens=round(replica.load.tokens),
                )
                for model in state.models
                if model.scaling is not None
                for replica in model.scaling.replicas
            ]
        )


async def _pause(state: ServerState, models: Iterable[ServedModel], mode: PauseMode, *, clear_cache: bool) -> None:
    """Pause models; none of them, if this is cancelled."""
    pauses: list[BegunPause] = []

    async def pause(model: ServedModel) -> None:
        commands = model.client.commands
        pauses.append(await commands.pause(mode))
        if clear_cache and mode != "keep":
            await commands.reset_prefix_cache()
            await commands.reset_encoder_cache()
            model.reset_media_cache()
            await state.others.reset_media_caches()

    try:
        await each_model(map(pause, models))
    except asyncio.CancelledError:
        for begun in pauses:
            begun.give_up()
        raise
    finally:
        for begun in pauses:
            begun.keep()  # without effect after it was given up


def _models(state: ServerState, name: str | None) -> list[ServedModel]:
    return [state.model(name)] if name else [*state.models]


def _update_folder(root: Path | None, path: str, param: str) -> Path:
    """The directory that a client names, which must be inside of the one that the operator allows.

    Raises:
        PermissionDenied: it is not.
        InvalidRequest: it is no path.
    """
    if root is None:
        raise PermissionDenied("The server was started without --weight-update-path, which new weights need.", param)
    try:
        allowed = root.resolve()
        folder = (allowed / path).resolve()
    except (ValueError, OSError) as error:  # a null character, a loop of links
        raise InvalidRequest(f"{shorten(path)!r} is not a path: {error}", param) from error
    if not folder.is_relative_to(allowed):
        raise PermissionDenied(f"`{param}` is not inside of --weight-update-path.", param)
    return folder


def _require_profiler(state: ServerState) -> None:
    if not state.profiler:
        raise InvalidRequest("The server was started without --profiler-config, which profiles need.")
