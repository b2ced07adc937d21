"""Errors that clients see, and the handlers that turn every error into a response.

ApiError
├── InvalidRequest    400
├── Unauthorized      401
├── NotFound          404
├── TimedOut          408
├── TooLarge          413
├── UrlTooLong        414
├── Misdirected       421
├── FailedDependency  424
├── TooManyRequests   429, too much load by this client; the caller sets Retry-After
├── HeadersTooLarge   431
├── Overloaded        503, too much load; the caller sets Retry-After
├── Unavailable       503 with Retry-After: 5, a component does not work
└── Internal          500
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.http.paths import endpoint_path
from quire.engine.client.errors import (
    DeadlineExceeded,
    EngineAsleep,
    EngineDead,
    EngineError,
    EngineOverloaded,
    RequestRefused,
    SleepFailed,
    TenantOverloaded,
)
from quire.multimodal.errors import PromptError
from quire.workers.errors import QueueFull, ShareExceeded, WorkerError

logger = logging.getLogger(__name__)
_MAX_PROBLEMS = 10
_NO_STRING = "Input should be a valid string"
_MAX_QUOTED = 200  # characters of a request in an error text
_MAX_MESSAGE = 4000  # characters of an error text
_SERVER_ERROR = 500
_CLIENT_CLOSED = 499  # status for logs and metrics; the response is not read
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_RESPONSES_KINDS = {
    408: "server_error",  # the request was valid
    424: "external_connector_error",
    429: "rate_limit_error",
}


_RESPONSES_PATH = "/v1/responses"


def shorten(text: str, length: int = _MAX_QUOTED) -> str:
    """A text of a request for an error text: its beginning, if it is long."""
    return text if len(text) <= length else f"{text[:length]}... ({len(text)} characters)"


class ApiError(Exception):
    """Base class: a response with OpenAI's error body.

    Attributes:
        status: HTTP status.
        kind: `type` in the body.
        param: the request field that caused the error, if one did.
    """

    status = HTTPStatus.INTERNAL_SERVER_ERROR
    kind = "InternalServerError"

    def __init__(self, message: str, param: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(shorten(message, _MAX_MESSAGE))
        self.param = None if param is None else shorten(param)
        self.headers = dict(headers or {})

    @property
    def message(self) -> str:
        """The text, without lone surrogates, which a chat template may have put into it."""
        return str(self).encode(errors="replace").decode()

    def body(self) -> dict[str, Any]:
        """The body in OpenAI's format."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": int(self.status)}}

    def anthropic_body(self) -> dict[str, Any]:
        """The body in Anthropic's format."""
        kind = _ANTHROPIC_KINDS.get(
            self.status, "invalid_request_error" if self.status < _SERVER_ERROR else "api_error"
        )
        named = self.param is None or self.param in self.message
        message = self.message if named else f"{self.param}: {self.message}"  # the body has no other place for it
        return {"type": "error", "error": {"type": kind, "message": message}}

    def responses_body(self) -> dict[str, Any]:
        """The body in the format of OpenAI's Responses API, whose clients know other types."""
        kind = "invalid_request_error" if self.status < _SERVER_ERROR else "server_error"
        return {"error": {**self.body()["error"], "type": _RESPONSES_KINDS.get(self.status, kind)}}

    def response(self, path: str) -> Response:
        """The response, in the format of the API that the path belongs to."""
        if path.startswith("/v1/messages"):
            body = self.anthropic_body()
        else:
            body = self.responses_body() if path.startswith(_RESPONSES_PATH) else self.body()
        return Response(orjson.dumps(body), self.status, self.headers, media_type="application/json")


class InvalidRequest(ApiError):
    """The request is malformed, or uses an unsupported feature."""

    status = HTTPStatus.BAD_REQUEST
    kind = "BadRequestError"


class Unauthorized(ApiError):
    """The API key is missing or wrong."""

    status = HTTPStatus.UNAUTHORIZED
    kind = "AuthenticationError"


class NotFound(ApiError):
    """The model, response or path does not exist."""

    status = HTTPStatus.NOT_FOUND
    kind = "NotFoundError"


class TooLarge(ApiError):
    """The body is larger than --max-body-size."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    kind = "RequestEntityTooLargeError"


class UrlTooLong(ApiError):
    """The URL is longer than --max-url-size."""

    status = HTTPStatus.REQUEST_URI_TOO_LONG
    kind = "UriTooLongError"


class Misdirected(ApiError):
    """The host name is not one of --allowed-hosts."""

    status = HTTPStatus.MISDIRECTED_REQUEST
    kind = "MisdirectedRequestError"


class HeadersTooLarge(ApiError):
    """There are more headers than --max-header-count, or they are larger than --max-header-size."""

    status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    kind = "RequestHeaderFieldsTooLargeError"


class FailedDependency(ApiError):
    """A server that the response depends on has failed."""

    status = HTTPStatus.FAILED_DEPENDENCY
    kind = "FailedDependencyError"


class TooManyRequests(ApiError):
    """The client has its share of what the server has; it may retry. The caller sets Retry-After."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    kind = "RateLimitError"


class Overloaded(ApiError):
    """Too much load; the client may retry. The caller sets Retry-After."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    kind = "ServiceUnavailableError"


class Unavailable(ApiError):
    """A component does not work: the engine, the store of responses or the grammar compiler.

    Retry-After is 5 seconds unless `headers` have another value.
    """

    status = HTTPStatus.SERVICE_UNAVAILABLE
    kind = "ServiceUnavailableError"

    def __init__(self, message: str, param: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message, param, {"Retry-After": "5", **(headers or {})})


class TimedOut(ApiError):
    """The request did not arrive in time, or generation took longer than its time limit."""

    status = HTTPStatus.REQUEST_TIMEOUT
    kind = "TimeoutError"


class Internal(ApiError):
    """An error of the server itself."""


class ClientDisconnected(Exception):
    """The client disconnected before its request was answered."""


def as_api_error(error: EngineError | PromptError | WorkerError) -> ApiError:
    """The error that a client sees for one of the engine, the renderer or the worker pools."""
    match error:
        case PromptError():
            return InvalidRequest(str(error), error.param)
        case TenantOverloaded():
            return TooManyRequests(str(error), headers={"Retry-After": str(error.retry_after)})
        case EngineOverloaded():
            return Overloaded(str(error), headers={"Retry-After": str(error.retry_after)})
        case ShareExceeded():
            message = f"The request cannot be prepared now: {error}."
            return TooManyRequests(message, headers={"Retry-After": str(error.retry_after)})
        case QueueFull():
            message = f"The server is too busy to prepare the request: {error}."
            return Overloaded(message, headers={"Retry-After": str(error.retry_after)})
        case WorkerError():
            return Unavailable(f"The request cannot be prepared: {error}.")
        case DeadlineExceeded():
            return TimedOut(str(error))
        case EngineDead():
            return Unavailable(str(error), headers={"Retry-After": str(error.retry_after)})
        case EngineAsleep() | SleepFailed():
            return Unavailable(str(error))
        case RequestRefused():
            return InvalidRequest(str(error))
        case _:
            return Internal(str(error))


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
        cause = error.__cause__  # FastAPI replaces errors that are raised while it reads the body
        return (cause if isinstance(cause, ApiError) else _from_http(error)).response(endpoint_path(request.scope))

    async def disconnected(request: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(ClientDisconnected, disconnected)
    app.add_exception_handler(EngineError, engine_error)
    app.add_exception_handler(PromptError, engine_error)
    app.add_exception_handler(WorkerError, engine_error)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http_error)
    app.add_middleware(_UnhandledErrors)


class _UnhandledErrors:
    """Responds to all other exceptions. (Starlette's handler raises them again, which closes the connection.)"""

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


def _validation_error(error: RequestValidationError) -> InvalidRequest:
    """All validation problems, grouped by field: a field may have problems of several members of a union."""
    found: dict[str | None, dict[str, None]] = {}
    for problem in error.errors():
        found.setdefault(field_path(problem, error.body), {})[_message(problem)] = None
    for where in _outer_fields(found):
        del found[where]
    lines = [f"{where or 'body'}: {_joined(list(messages))}" for where, messages in list(found.items())[:_MAX_PROBLEMS]]
    if len(found) > _MAX_PROBLEMS:
        lines.append(f"and {len(found) - _MAX_PROBLEMS} more")
    return InvalidRequest("; ".join(lines), next(iter(found), None))


def _outer_fields(found: Mapping[str | None, Mapping[str, None]]) -> list[str]:
    """Fields with problems inside of them that are only said not to be a string, the other type that they may have."""
    paths = [where for where in found if where is not None]
    return [
        where
        for where in paths
        if list(found[where]) == [_NO_STRING] and any(path.startswith((f"{where}[", f"{where}.")) for path in paths)
    ]


def _message(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "json_invalid":
        return f"{problem['msg']}: {problem['ctx']['error']}"
    if problem["type"] == "union_tag_invalid":
        about = problem["ctx"]
        supported = f"is not supported as {about['discriminator']}; supported: {about['expected_tags']}"
        return f"{shorten(about['tag'])!r} {supported}"
    return shorten(str(problem["msg"]).removeprefix("Value error, "), _MAX_MESSAGE // _MAX_PROBLEMS)


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
