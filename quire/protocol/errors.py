"""Errors that clients see, with their bodies in the formats of the APIs.

ApiError
├── InvalidRequest    400
├── Unauthorized      401
├── PermissionDenied  403
├── NotFound          404
├── TimedOut          408
├── Conflict          409
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
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from starlette.responses import Response

from quire.engine.client.errors import (
    BlocksNotRead,
    CommandRefused,
    DeadlineExceeded,
    EngineAsleep,
    EngineDead,
    EngineError,
    EngineOverloaded,
    RequestAborted,
    RequestRefused,
    SleepFailed,
    TenantOverloaded,
)
from quire.multimodal.errors import PromptError
from quire.workers.errors import QueueFull, ShareExceeded, WorkerError

logger = logging.getLogger(__name__)
_MAX_QUOTED = 200  # characters of a request in an error text
MAX_MESSAGE = 4000  # characters of an error text
_SERVER_ERROR = 500
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
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
        super().__init__(shorten(message, MAX_MESSAGE))
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


class PermissionDenied(ApiError):
    """The API key, the web page that sends the request, or the operator does not allow it."""

    status = HTTPStatus.FORBIDDEN
    kind = "PermissionDeniedError"


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


class Conflict(ApiError):
    """The state of the server does not allow it now."""

    status = HTTPStatus.CONFLICT
    kind = "ConflictError"


class TimedOut(ApiError):
    """The request did not arrive in time, or generation took longer than its time limit."""

    status = HTTPStatus.REQUEST_TIMEOUT
    kind = "TimeoutError"


class Internal(ApiError):
    """An error of the server itself."""


class ClientDisconnected(Exception):
    """The client disconnected before its request was answered."""


def disk_error(error: OSError, what: str, param: str) -> Unavailable:
    """The error of a file of a request that the disk, which may be full, does not take or give.

    `what`: what cannot be done with the file. `param`: the request field that has or names it.
    """
    logger.error("a file of a request cannot be %s: %s", what, error)
    return Unavailable(f"The file cannot be {what}: {error.strerror or type(error).__name__}.", param)


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
        case EngineAsleep() | SleepFailed() | RequestAborted() | BlocksNotRead():
            return Unavailable(str(error))
        case CommandRefused():
            return Conflict(str(error))
        case RequestRefused():
            return InvalidRequest(str(error))
        case _:
            return Internal(str(error))
