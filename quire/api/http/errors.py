"""Errors that a client sees, and the one place where they become responses.

ApiError
├── InvalidRequest    400
├── Unauthorized      401
├── NotFound          404
├── TimedOut          408
├── TooLarge          413
├── FailedDependency  424
├── Overloaded        503 with Retry-After
├── Unavailable       503
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

from quire.engine.wire.errors import DeadlineExceeded, EngineDead, EngineError, EngineOverloaded, RequestFailed
from quire.multimodal.errors import PromptError

logger = logging.getLogger(__name__)
_MOST_PROBLEMS = 10
_OUR_FAULT = 500
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class ApiError(Exception):
    """Base: an answer with OpenAI's error envelope.

    Attributes:
        status: HTTP status.
        kind: the envelope's `type`.
        param: the request field that is to blame, if one is.
    """

    status = HTTPStatus.INTERNAL_SERVER_ERROR
    kind = "InternalServerError"

    def __init__(self, message: str, param: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.headers = dict(headers or {})

    @property
    def message(self) -> str:
        """What to tell; a template may have put half a character into it."""
        return str(self).encode(errors="replace").decode()

    def body(self) -> dict[str, Any]:
        """The envelope."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": int(self.status)}}

    def anthropic_body(self) -> dict[str, Any]:
        """The envelope of Anthropic's API."""
        kind = _ANTHROPIC_KINDS.get(self.status, "invalid_request_error" if self.status < _OUR_FAULT else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str) -> Response:
        """The answer, in the words of the API that the path belongs to."""
        body = self.anthropic_body() if path.startswith("/v1/messages") else self.body()
        return Response(orjson.dumps(body), self.status, self.headers, media_type="application/json")


class InvalidRequest(ApiError):
    """The request cannot be answered as it stands."""

    status = HTTPStatus.BAD_REQUEST
    kind = "BadRequestError"


class Unauthorized(ApiError):
    """No key, or a wrong one."""

    status = HTTPStatus.UNAUTHORIZED
    kind = "AuthenticationError"


class NotFound(ApiError):
    """There is no such model or page."""

    status = HTTPStatus.NOT_FOUND
    kind = "NotFoundError"


class TooLarge(ApiError):
    """The body has more bytes than the server takes."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    kind = "RequestEntityTooLargeError"


class FailedDependency(ApiError):
    """Another server that the answer needs has failed."""

    status = HTTPStatus.FAILED_DEPENDENCY
    kind = "FailedDependencyError"


class Overloaded(ApiError):
    """Batch and queue are full; come again."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    kind = "ServiceUnavailableError"


class Unavailable(ApiError):
    """The engine has ended."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    kind = "ServiceUnavailableError"


class TimedOut(ApiError):
    """The answer took longer than it may."""

    status = HTTPStatus.REQUEST_TIMEOUT
    kind = "TimeoutError"


class Internal(ApiError):
    """It is our fault."""


def as_api_error(error: EngineError | PromptError) -> ApiError:
    """What a client is told of an error from below."""
    match error:
        case PromptError():
            return InvalidRequest(str(error), error.param)
        case EngineOverloaded():
            return Overloaded(str(error), headers={"Retry-After": str(error.retry_after)})
        case DeadlineExceeded():
            return TimedOut(str(error))
        case EngineDead():
            return Unavailable(str(error))
        case RequestFailed():
            return InvalidRequest(str(error))
        case _:
            return Internal(str(error))


def install(app: FastAPI) -> None:
    """Let the app answer every error with the envelope."""

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response(request.url.path)

    async def below(request: Request, error: Exception) -> Response:
        assert isinstance(error, EngineError | PromptError)
        return as_api_error(error).response(request.url.path)

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _validation_error(error).response(request.url.path)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _from_http(error).response(request.url.path)

    app.add_exception_handler(ApiError, ours)
    app.add_exception_handler(EngineError, below)
    app.add_exception_handler(PromptError, below)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    app.add_middleware(_LastResort)


class _LastResort:
    """Answers whatever else is raised. (Starlette's handler raises it again, and that ends a kept-alive connection.)"""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            if begun or scope["type"] != "http":
                raise  # an answer that has begun can only be cut off
            logger.exception("%s %r failed", scope["method"], scope["path"])
            await Internal("Internal server error").response(scope["path"])(scope, receive, send)


def _validation_error(error: RequestValidationError) -> InvalidRequest:
    """All problems, those of one field (which may be alternatives to each other) together."""
    found: dict[str | None, dict[str, None]] = {}
    for problem in error.errors():
        found.setdefault(_location(problem, error.body), {})[_message(problem)] = None
    lines = [f"{where or 'body'}: {_either(list(said))}" for where, said in list(found.items())[:_MOST_PROBLEMS]]
    if len(found) > _MOST_PROBLEMS:
        lines.append(f"and {len(found) - _MOST_PROBLEMS} more")
    return InvalidRequest("; ".join(lines), next(iter(found), None))


def _message(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "json_invalid":
        return f"{problem['msg']}: {problem['ctx']['error']}"
    return str(problem["msg"]).removeprefix("Value error, ")


def _either(messages: Sequence[str]) -> str:
    shared = "Input should be "
    if all(message.startswith(shared) for message in messages):
        return shared + " or ".join(message.removeprefix(shared) for message in messages)
    return "; ".join(messages)


def _location(problem: Mapping[str, Any], body: Any) -> str | None:
    """Dotted path of the field: what the body really has, without the names of union members."""
    if problem["type"] == "json_invalid":
        return None
    if named := problem.get("ctx", {}).get("param"):
        return str(named)
    parts = [part for part in problem["loc"] if part != "body"]
    path = []
    for number, part in enumerate(parts, 1):
        inside = isinstance(body, dict) and part in body
        inside = inside or (isinstance(body, list) and isinstance(part, int) and part < len(body))
        if inside:
            body = body[part]
        if inside or (problem["type"] == "missing" and number == len(parts)):
            path.append(str(part))
    return ".".join(path) or None


def _from_http(error: HTTPException) -> ApiError:
    status = HTTPStatus(error.status_code)
    answer = ApiError(str(error.detail), headers=error.headers)
    answer.status = status
    answer.kind = {
        404: "NotFoundError",
        405: "MethodNotAllowedError",
        413: TooLarge.kind,
    }.get(status, "BadRequestError")
    return answer
