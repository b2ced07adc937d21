"""The route class of all endpoints: checks that each of them needs, and resources that a request holds."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, ExitStack
from traceback import clear_frames
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.api.http.body import JsonRequest, check_media_type
from quire.api.http.tenant import set_tenant
from quire.protocol import fields

Endpoint = Callable[..., Coroutine[Any, Any, Any]]
Handler = Callable[[Request], Coroutine[Any, Any, Response]]
_RESOURCES = "quire.resources"  # key of a request's ExitStack in its ASGI scope


class EndpointCall(Response):
    """An endpoint with its arguments, which `CheckedRoute` calls. FastAPI passes it on, as it passes on all responses.

    FastAPI holds the raw and the parsed body until an endpoint has returned: up to a gigabyte. So what it calls returns
    this at once.
    """

    def __init__(self, run: Callable[[], Coroutine[Any, Any, Response]]) -> None:
        super().__init__()
        self.run = run


class CheckedRoute(APIRoute):
    """A route that reads its body strictly and checks undeclared fields before its endpoint runs.

    Context managers that the endpoint enters with `enter_for_request` are exited once the response has been sent, and
    on every other path: if the endpoint raises, and if the client disconnects before anything of the response is read.

    An endpoint with a parameter `body` needs a parameter `request` as well.
    """

    def __init__(self, path: str, endpoint: Endpoint, **options: Any) -> None:
        super().__init__(
            path, _with_field_check(endpoint, returns_response=options.get("response_model") is None), **options
        )

    def get_route_handler(self) -> Handler:
        """Wrap FastAPI's handler: checks of the request before it, the endpoint and the response's headers after it."""
        handle = super().get_route_handler()
        has_body = self.body_field is not None

        async def handle_checked(request: Request) -> Response:
            if has_body:
                check_media_type(request)
            request = JsonRequest(request.scope, request.receive)
            try:
                response = await handle(request)
            except (HTTPException, RequestValidationError) as error:
                # FastAPI's frame has it in a variable: a cycle, which would hold the body until garbage is collected.
                clear_frames(error.__traceback__)
                raise
            request.drop_body()
            if isinstance(response, EndpointCall):
                response = await response.run()
            fields.add_header(request, response)
            return response

        return handle_checked

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, then release its resources."""
        set_tenant(scope)
        with ExitStack() as resources:
            scope[_RESOURCES] = resources
            await super().handle(scope, receive, send)


def enter_for_request(request: Request, context: AbstractContextManager[Any]) -> None:
    """Enter a context manager that is exited when the request has been answered."""
    _resources(request).enter_context(context)


def release_resources(request: Request) -> None:
    """Exit all context managers of a request now."""
    _resources(request).close()


def releaser(request: Request) -> Callable[[], None]:
    """Return a function that exits all context managers of a request."""
    return functools.partial(release_resources, request)


def detach_resources(request: Request) -> ExitStack:
    """Give the context managers of a request to the caller, which must exit them."""
    return _resources(request).pop_all()


def _resources(request: Request) -> ExitStack:
    resources: ExitStack = request.scope[_RESOURCES]
    return resources


def _with_field_check(endpoint: Endpoint, *, returns_response: bool) -> Endpoint:
    """Return what FastAPI calls: a check of the body's undeclared fields, and the endpoint.

    An endpoint that makes its response itself is left to the route. One with a response model is called here, as
    FastAPI has to serialize what it returns.
    """
    parameters = inspect.signature(endpoint).parameters
    if "body" not in parameters or getattr(endpoint, "checks_fields", False):
        return endpoint
    if "request" not in parameters:
        raise TypeError(f"{endpoint.__name__} has a parameter `body` and needs `request` as well")

    @functools.wraps(endpoint)
    async def checked(**values: Any) -> Any:
        request = values["request"]
        fields.ignore(request, fields.take_unknown_fields(values["body"]))
        if not returns_response:
            return await endpoint(**values)
        return EndpointCall(functools.partial(endpoint, **values))

    checked.checks_fields = True  # type: ignore[attr-defined]  # FastAPI may make a second route of the endpoint
    return checked
