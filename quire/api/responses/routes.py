"""/v1/responses: OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from quire.api.http.body import StrictRoute
from quire.api.http.errors import ApiError, InvalidRequest
from quire.api.http.sse import EventStream, answer, typed_event
from quire.api.protocol.common import ERRORS, ErrorBody, streamed
from quire.api.protocol.responses import Deleted, InputItems, ResponseObject, ResponsesRequest
from quire.api.responses.service import ResponseService
from quire.api.responses.writer import Event
from quire.api.serving.models import Services

_Place = Annotated[int | None, Query(ge=0, lt=1 << 31)]


def router(services: Services, service: ResponseService) -> APIRouter:
    """The endpoints."""
    routes = APIRouter(route_class=StrictRoute)
    answers = streamed(ResponseObject)
    made = {**answers, 424: {"model": ErrorBody, "description": "an MCP server did not list its tools"}}

    def stream(
        events: AsyncGenerator[Event, None], headers: dict[str, str], free: Callable[[], None] = _nothing
    ) -> EventStream:
        return EventStream(_sse(events), headers, free, keepalive=services.sse_keepalive, error=_error, done=b"")

    @routes.post("/v1/responses", responses=made, response_model=None)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation, now or in the background."""
        admitted = await service.admit(body)
        run, headers = admitted.run, admitted.headers
        if body.background:
            following = await service.start(admitted)
            return stream(following.read(-1), headers) if body.stream else _object(run.told(), headers)
        if body.stream:
            return stream(service.events(run), headers, admitted.free)
        return await answer(request, service.whole(run), headers, admitted.free)

    @routes.get("/v1/responses/{response_id}", responses=answers, response_model=None)
    async def get_response(
        response_id: str,
        stream_again: Annotated[bool, Query(alias="stream")] = False,
        starting_after: _Place = None,
    ) -> Response:
        """A stored response, or its events once more."""
        if starting_after is not None and not stream_again:
            raise InvalidRequest("`starting_after` needs `stream=true`.", "starting_after")
        if not stream_again:
            return _object((await service.stored(response_id)).response, {})
        return stream(await service.replay(response_id, -1 if starting_after is None else starting_after), {})

    @routes.delete("/v1/responses/{response_id}", responses={200: {"model": Deleted}, **ERRORS})
    async def delete_response(response_id: str) -> Deleted:
        """Forget a response."""
        await service.delete(response_id)
        return Deleted(id=response_id)

    @routes.post("/v1/responses/{response_id}/cancel", responses=answers, response_model=None)
    async def cancel_response(response_id: str) -> Response:
        """Stop a response in the background."""
        return _object(await service.cancel(response_id), {})

    @routes.get("/v1/responses/{response_id}/input_items", responses={200: {"model": InputItems}, **ERRORS})
    async def list_input_items(
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> InputItems:
        """What a response answered."""
        return _page(await service.input_items(response_id), limit, order, after)

    return routes


def _nothing() -> None:
    """A stream that holds no place in the engine has none to give back."""


def _page(items: list[dict[str, Any]], limit: int, order: str, after: str | None) -> InputItems:
    """Some of the items, which come oldest first."""
    if order == "desc":
        items = items[::-1]
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise InvalidRequest(f"There is no item '{after}'.", "after")
        items = items[places[0] + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return InputItems(data=page, first_id=first, last_id=last, has_more=len(items) > limit)


async def _sse(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for event in events:
            yield typed_event(event)


def _error(error: ApiError) -> bytes:
    """The event that ends a stream in the middle."""
    detail = error.body()["error"]
    told = {"code": str(detail["code"]), "message": detail["message"], "param": detail["param"]}
    return typed_event({"type": "error", **told})


def _object(response: dict[str, object], headers: dict[str, str]) -> Response:
    return Response(orjson.dumps(response), headers=headers, media_type="application/json")
