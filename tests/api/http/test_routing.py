"""Checks and resources of the route class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel, ConfigDict

from quire.api.http import fields
from quire.api.http.errors import install_error_handlers
from quire.api.http.routing import CheckedRoute, detach_resources, enter_for_request, release_resources


class Body(BaseModel):
    model_config = ConfigDict(extra="allow")

    mode: str = "plain"


HELD: list[str] = []


@contextmanager
def held(name: str) -> Iterator[None]:
    HELD.append(name)
    try:
        yield
    finally:
        HELD.remove(name)


async def post(strict: bool = False, **body: object) -> httpx.Response:
    routes = APIRouter(route_class=CheckedRoute)

    @routes.post("/")
    async def endpoint(body: Body, request: Request) -> list[str]:
        enter_for_request(request, held("slot"))
        fields.ignore(request, ["unused"] if body.mode == "unused" else [])
        if body.mode == "raise":
            raise ZeroDivisionError
        if body.mode == "release":
            release_resources(request)
        if body.mode == "detach":
            with detach_resources(request):
                assert HELD == ["slot"]
        return list(HELD)

    app = FastAPI()
    app.state.strict_fields = strict
    install_error_handlers(app)
    app.include_router(routes)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return await client.post("/", json=body)


@pytest.mark.parametrize(
    ("mode", "status", "seen"),
    [("plain", 200, ["slot"]), ("release", 200, []), ("detach", 200, []), ("raise", 500, None)],
)
async def test_resources_are_released(mode: str, status: int, seen: list[str] | None) -> None:
    answer = await post(mode=mode)
    assert answer.status_code == status
    assert seen is None or answer.json() == seen
    assert HELD == []


async def test_fields_without_effect_are_named_in_a_header_or_refused() -> None:
    assert fields.HEADER not in (await post()).headers
    assert (await post(odd=1)).headers[fields.HEADER] == "odd"
    assert (await post(odd=1, mode="unused")).headers[fields.HEADER] == "odd, unused"
    for body in ({"odd": 1}, {"mode": "unused"}):
        refused = await post(strict=True, **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "odd" if "odd" in body else "unused")
    assert (await post(best_of=2)).status_code == 400
    assert HELD == []


def test_an_endpoint_with_a_body_needs_the_request() -> None:
    routes = APIRouter(route_class=CheckedRoute)
    with pytest.raises(TypeError, match="request"):

        @routes.post("/")
        async def endpoint(body: Body) -> None:
            """Cannot be checked."""
