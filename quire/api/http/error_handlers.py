"""Handlers that turn every error into a response."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.http.request_head import endpoint_path
from quire.engine.client.errors import EngineError
from quire.multimodal.errors import PromptError
from quire.protocol.errors import (
    MAX_MESSAGE,
    ApiError,
    ClientDisconnected,
    Internal,
    InvalidRequest,
    TooLarge,
    as_api_error,
    shorten,
)
from quire.workers.errors import WorkerError

logger = logging.getLogger(__name__)
_MAX_PROBLEMS = 10
_NO_STRING = "Input should be a valid string"
_NO_OBJECT = frozenset({"dict_type", "model_type", "model_attributes_type", "dataclass_type"})  # types of problems
CLIENT_CLOSED = 499  # status for logs and metrics; the response is not read


def install_error_handlers(app: FastAPI) -> None:
    """Make the app respond to every error with an error body."""

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response(endpoint_path(request.scope))

    async def engine_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, EngineError | PromptError | WorkerError)
        return as_api_error(error).response(endpoint_path(request.scope))

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _validation_error(error).response(endpoint_path(request.scope))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = endpoint_path(request.scope)
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            error.headers = {"Allow": ", ".join(sorted(_methods(app, path)))}
        cause = error.__cause__  # FastAPI replaces errors that are raised while it reads the body
        return (cause if isinstance(cause, ApiError) else _from_http(error)).response(path)

    async def disconnected(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(ClientDisconnected, disconnected)
    app.add_exception_handler(EngineError, engine_error)
    app.add_exception_handler(PromptError, engine_error)
    app.add_exception_handler(WorkerError, engine_error)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http_error)
    app.add_middleware(_UnhandledErrors)


class _UnhandledErrors:
    """Respond to all other exceptions. (Starlette's handler raises them again, which closes the connection.)"""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            if started or scope["type"] != "http":
                raise  # a response that has started can only be cut off
            logger.exception("%s %r failed", scope["method"], scope["path"])
            await Internal("Internal server error").response(endpoint_path(scope))(scope, receive, send)


def _methods(app: FastAPI, path: str) -> set[str]:
    """The methods of all routes with a path. (Starlette names those of one route.)"""
    routes = (route for route in iter_route_contexts(app.routes) if getattr(route, "methods", None))
    methods = {method for route in routes if route.path_regex.match(path) for method in route.methods or ()}
    return methods | {"HEAD"} if "GET" in methods else methods


def _validation_error(error: RequestValidationError) -> InvalidRequest:
    """All validation problems, grouped by field: a field may have problems of several members of a union."""
    problems: dict[str | None, dict[str, None]] = {}
    for problem in error.errors():
        problems.setdefault(field_path(problem, error.body), {})[_message(problem)] = None
    for where in _outer_fields(problems):
        del problems[where]
    lines = [
        f"{where or 'body'}: {_joined(list(messages))}" for where, messages in list(problems.items())[:_MAX_PROBLEMS]
    ]
    if len(problems) > _MAX_PROBLEMS:
        lines.append(f"and {len(problems) - _MAX_PROBLEMS} more")
    return InvalidRequest("; ".join(lines), next(iter(problems), None))


def _outer_fields(problems: Mapping[str | None, Mapping[str, None]]) -> list[str]:
    """Fields with problems inside of them that are only said not to be a string, the other type that they may have."""
    paths = [where for where in problems if where is not None]
    return [
        where
        for where in paths
        if list(problems[where]) == [_NO_STRING] and any(path.startswith((f"{where}[", f"{where}.")) for path in paths)
    ]


def _message(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "json_invalid":
        return f"{problem['msg']}: {problem['ctx']['error']}"
    if problem["type"] == "union_tag_invalid":
        about = problem["ctx"]
        # The discriminator is the name of a function where the type is found by one.
        return f"The type {shorten(about['tag'])!r} is not supported; supported: {about['expected_tags']}"
    if problem["type"] in _NO_OBJECT:  # pydantic speaks of dictionaries, and names classes
        return "Input should be an object"
    return shorten(str(problem["msg"]).removeprefix("Value error, "), MAX_MESSAGE // _MAX_PROBLEMS)


def _joined(messages: Sequence[str]) -> str:
    shared = "Input should be "
    if all(message.startswith(shared) for message in messages):
        return shared + " or ".join(message.removeprefix(shared) for message in messages)
    return "; ".join(messages)


def field_path(problem: Mapping[str, Any], body: Any) -> str | None:
    """Path of a problem's field in the body, as in `messages[0].role`, without pydantic's names of union members."""
    if problem["type"] == "json_invalid":
        return None
    if named := problem.get("ctx", {}).get("param"):
        return str(named)
    if problem["loc"][:1] in (("query",), ("path",)):
        return str(problem["loc"][1])
    parts = [part for part in problem["loc"] if part != "body"]
    path = ""
    for number, part in enumerate(parts, 1):
        inside = isinstance(body, dict) and part in body
        inside = inside or (isinstance(body, list) and isinstance(part, int) and part < len(body))
        if inside:
            body = body[part]
        if inside or (problem["type"] == "missing" and number == len(parts)):
            path += f"[{part}]" if isinstance(part, int) else f".{shorten(part)}"
    return path.removeprefix(".") or None


def _from_http(error: HTTPException) -> ApiError:
    status = HTTPStatus(error.status_code)
    response = ApiError(str(error.detail), headers=error.headers)
    response.status = status
    response.kind = {
        404: "NotFoundError",
        405: "MethodNotAllowedError",
        413: TooLarge.kind,
    }.get(status, "BadRequestError")
    return response
