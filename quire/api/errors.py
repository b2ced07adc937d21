"""Errors that a client sees, and the one place where they become responses.

ApiError
├── InvalidRequest    400
├── Unauthorized      401
├── NotFound          404
├── Overloaded        503 with Retry-After
├── Unavailable       503
└── Internal          500
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from quire.engine.wire.errors import EngineDead, EngineError, EngineOverloaded, RequestFailed
from quire.multimodal.errors import PromptError

logger = logging.getLogger(__name__)
_MOST_PROBLEMS = 10


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

    def body(self) -> dict[str, Any]:
        """The envelope."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": int(self.status)}}

    def response(self) -> Response:
        """The answer."""
        return Response(orjson.dumps(self.body()), self.status, self.headers, media_type="application/json")


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


class Overloaded(ApiError):
    """Batch and queue are full; come again."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    kind = "ServiceUnavailableError"


class Unavailable(ApiError):
    """The engine has ended."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    kind = "ServiceUnavailableError"


class Internal(ApiError):
    """It is our fault."""


def as_api_error(error: EngineError | PromptError) -> ApiError:
    """What a client is told of an error from below."""
    match error:
        case PromptError():
            return InvalidRequest(str(error), error.param)
        case EngineOverloaded():
            return Overloaded(str(error), headers={"Retry-After": str(error.retry_after)})
        case EngineDead():
            return Unavailable(str(error))
        case RequestFailed():
            return InvalidRequest(str(error))
        case _:
            return Internal(str(error))


def install(app: FastAPI) -> None:
    """Let the app answer every error with the envelope."""

    async def ours(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def below(_: Request, error: Exception) -> Response:
        assert isinstance(error, EngineError | PromptError)
        return as_api_error(error).response()

    async def validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _validation_error(error).response()

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _from_http(error).response()

    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return Internal("Internal server error").response()

    app.add_exception_handler(ApiError, ours)
    app.add_exception_handler(EngineError, below)
    app.add_exception_handler(PromptError, below)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)


def _validation_error(error: RequestValidationError) -> InvalidRequest:
    problems = error.errors()
    lines = [f"{_location(item)}: {_message(item)}" for item in problems[:_MOST_PROBLEMS]]
    if len(problems) > _MOST_PROBLEMS:
        lines.append(f"and {len(problems) - _MOST_PROBLEMS} more")
    return InvalidRequest("; ".join(lines), _location(problems[0]) if problems else None)


def _message(problem: Mapping[str, Any]) -> str:
    cause = problem.get("ctx", {}).get("error")
    return f"{problem['msg']}: {cause}" if problem["type"] == "json_invalid" else str(problem["msg"])


def _location(problem: Mapping[str, Any]) -> str:
    """Dotted path of the field, without the word `body` and the names of union members."""
    path = [str(part) for part in problem["loc"] if part != "body"]
    return ".".join(part for part in path if part.isidentifier() or part.isdigit()) or "body"


def _from_http(error: HTTPException) -> ApiError:
    status = HTTPStatus(error.status_code)
    answer = ApiError(str(error.detail), headers=error.headers)
    answer.status = status
    answer.kind = {
        404: "NotFoundError",
        405: "MethodNotAllowedError",
        413: "RequestEntityTooLargeError",
    }.get(status, "BadRequestError")
    return answer
