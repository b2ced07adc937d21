"""/v1/responses: OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from quire.api.chat.rendered import rendered_chat
from quire.api.http.admission import admit
from quire.api.http.routing import CheckedRoute, detach_resources, releaser
from quire.api.http.sse import EventStream, respond_unless_disconnected, typed_event, unless_disconnected
from quire.api.http.tenant import owner_of
from quire.api.responses.service import ResponseService
from quire.api.responses.writer import Event
from quire.protocol import fields
from quire.protocol.common import ERRORS, ErrorBody, openapi_stream
from quire.protocol.errors import ApiError, InvalidRequest
from quire.protocol.generate import RenderedPrompt
from quire.protocol.responses import DeletedResponse, InputItems, ResponseObject, ResponsesRequest
from quire.serving.models import ServerState

NOT_STORED = "x-quire-not-stored"  # header with the reason, if a response could not be stored
_RESPONSES = openapi_stream(ResponseObject)
_SequenceNumber = Annotated[int | None, Query(ge=0, lt=1 << 31)]


def router(state: ServerState, service: ResponseService) -> APIRouter:
    """A router with the endpoints of responses."""
    routes = APIRouter(route_class=CheckedRoute)
    _add_creation(routes, state, service)
    _add_stored_responses(routes, state, service)
    return routes


def render_router(state: ServerState, service: ResponseService) -> APIRouter:
    """A router with the endpoint that generates nothing."""
    routes = APIRouter(route_class=CheckedRoute)

    @routes.post("/v1/responses/render", responses=ERRORS)
    async def render_response(body: ResponsesRequest, request: Request) -> RenderedPrompt:
        """Render and tokenize the first turn of a conversation without generating anything."""
        model = state.generating_model(body.model)
        run = await unless_disconnected(request, service.prepare(body, model, owner_of(request.scope)))
        fields.ignore(request, run.unused_fields)
        return rendered_chat(run.prepared)

    return routes


def _add_creation(routes: APIRouter, state: ServerState, service: ResponseService) -> None:
    created = {**_RESPONSES, 424: {"model": ErrorBody, "description": "an MCP server did not list its tools"}}

    @routes.post("/v1/responses", responses=created, response_model=None)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation, now or in the background."""
        if body.background and not body.is_stored:
            raise InvalidRequest("background can only be used when `store` is true", "background")
        if body.background and state.others.count:
            raise InvalidRequest(
                "`background` is not supported by a server with several processes (--api-server-count): later requests "
                "would not find the one that generates the response.",
                "background",
            )
        model = state.generating_model(body.model)
        admit(request, model, 1, "input")
        run = await unless_disconnected(request, service.prepare(body, model, owner_of(request.scope)))
        fields.ignore(request, run.unused_fields)
        if body.background:
            log = await service.start(run, detach_resources(request))
            return _stream(log.read(-1), state) if body.stream else _object(run.to_json())
        if body.stream:
            if not run.tools.labels:  # otherwise there may be more turns
                run.ended = releaser(request)
            return _stream(service.events(run), state)
        answer = await respond_unless_disconnected(request, service.complete(run))
        if run.unstored_reason is not None:
            answer.headers[NOT_STORED] = run.unstored_reason
        return answer


def _add_stored_responses(routes: APIRouter, state: ServerState, service: ResponseService) -> None:
    @routes.get("/v1/responses/{response_id}", responses=_RESPONSES, response_model=None)
    async def get_response(
        response_id: str,
        request: Request,
        stream_again: Annotated[bool, Query(alias="stream")] = False,
        starting_after: _SequenceNumber = None,
    ) -> Response:
        """A stored response, or its events again."""
        if starting_after is not None and not stream_again:
            raise InvalidRequest("`starting_after` requires `stream=true`.", "starting_after")
        owner = owner_of(request.scope)
        if not stream_again:
            return _object((await service.stored(response_id, owner)).response)
        events = await service.replay(response_id, owner, -1 if starting_after is None else starting_after)
        return _stream(events, state)

    @routes.delete("/v1/responses/{response_id}", responses={200: {"model": DeletedResponse}, **ERRORS})
    async def delete_response(response_id: str, request: Request) -> DeletedResponse:
        """Delete a stored response."""
        await service.delete(response_id, owner_of(request.scope))
        return DeletedResponse(id=response_id)

    @routes.post("/v1/responses/{response_id}/cancel", responses=_RESPONSES, response_model=None)
    async def cancel_response(response_id: str, request: Request) -> Response:
        """Cancel a response in the background."""
        return _object(await service.cancel(response_id, owner_of(request.scope)))

    @routes.get("/v1/responses/{response_id}/input_items", responses={200: {"model": InputItems}, **ERRORS})
    async def list_input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> InputItems:
        """The input of a response, with that of the responses before it."""
        return _page(await service.input_items(response_id, owner_of(request.scope)), limit, order, after)


def _page(items: list[dict[str, Any]], limit: int, order: str, after: str | None) -> InputItems:
    """One page of items, which are given oldest first."""
    if order == "desc":
        items = items[::-1]
    if after is not None:
        indices = [index for index, item in enumerate(items) if item["id"] == after]
        if not indices:
            raise InvalidRequest(f"There is no item '{after[:100]}'.", "after")
        items = items[indices[0] + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return InputItems(data=page, first_id=first, last_id=last, has_more=len(items) > limit)


def _stream(events: AsyncGenerator[Event, None], state: ServerState) -> EventStream:
    return EventStream(_encoded(events), keepalive=state.sse_keep_alive_interval, error=_error, done=b"")


async def _encoded(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for event in events:
            yield typed_event(event)


def _error(error: ApiError) -> bytes:
    """The event of an error after the stream has begun."""
    detail = error.responses_body()["error"]
    fields = {"code": detail["type"], "message": detail["message"], "param": detail["param"]}
    return typed_event({"type": "error", **fields})


def _object(response: dict[str, object]) -> Response:
    return Response(orjson.dumps(response), media_type="application/json")
