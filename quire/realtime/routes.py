"""WebSocket /v1/realtime, and the endpoints that make client secrets for it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Request, WebSocket
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from quire.api.http.keys import API_KEY
from quire.api.http.routing import CheckedRoute
from quire.protocol.common import ERRORS, ErrorBody
from quire.protocol.errors import ApiError, InvalidRequest, NotFound
from quire.realtime.errors import EventError
from quire.realtime.secrets import SessionForm
from quire.realtime.sessions import Sessions, dialect_of

PATH = "/v1/realtime"
_BETA_SECONDS = 60  # as of OpenAI's
_UPGRADE_REQUIRED = 426


class ExpiresAfter(BaseModel):
    """When a secret expires."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Field(ge=10, le=7200)] = 600


class ClientSecretRequest(BaseModel):
    """Body of POST /v1/realtime/client_secrets. `session` is a session as in session.update."""

    model_config = ConfigDict(extra="allow")

    expires_after: ExpiresAfter | None = None
    session: dict[str, Any] | None = None


class SecretOptions(BaseModel):
    """`client_secret` of the beta. OpenAI's client has one name for each endpoint; both are accepted."""

    expires_after: ExpiresAfter | None = None
    expires_at: ExpiresAfter | None = None


class BetaSessionRequest(BaseModel):
    """Body of the beta's endpoints: a session as in session.update or transcription_session.update of the beta."""

    model_config = ConfigDict(extra="allow")

    client_secret: SecretOptions | None = None
    model: Any = None
    input_audio_format: Any = None
    input_audio_transcription: Any = None
    input_audio_noise_reduction: Any = None
    turn_detection: Any = None
    include: Any = None
    modalities: Any = None
    instructions: Any = None
    max_response_output_tokens: Any = None
    output_audio_format: Any = None
    speed: Any = None
    temperature: Any = None
    tool_choice: Any = None
    tools: Any = None
    tracing: Any = None
    voice: Any = None


def router(sessions: Sessions) -> APIRouter:
    """A router with the endpoints of realtime sessions and client secrets."""
    routes = APIRouter(route_class=CheckedRoute, responses=ERRORS)

    @routes.websocket(PATH)
    async def realtime(websocket: WebSocket) -> None:
        await sessions.serve(websocket)

    refusal: dict[str, Any] = {
        "model": ErrorBody,
        "description": "the request does not ask for an upgrade to WebSocket",
    }

    @routes.get(PATH, responses={_UPGRADE_REQUIRED: refusal})
    async def not_upgraded() -> None:
        """Say that this is a WebSocket endpoint."""
        raise HTTPException(
            _UPGRADE_REQUIRED,
            "/v1/realtime is a WebSocket endpoint.",
            {"Upgrade": "websocket", "Connection": "Upgrade"},
        )

    @routes.post(f"{PATH}/client_secrets")
    async def client_secrets(body: ClientSecretRequest, request: Request) -> dict[str, Any]:
        """Make a key for a client, such as a page in a browser."""
        seconds = (body.expires_after or ExpiresAfter()).seconds
        secret, session = _make(sessions, request, body.session or {}, seconds=seconds, form="ga")
        return {**secret, "session": session}

    @routes.post(f"{PATH}/sessions")
    async def beta_sessions(body: BetaSessionRequest, request: Request) -> dict[str, Any]:
        """Make a key for a client, in the beta."""
        return _beta_secret(sessions, request, body, "beta")

    @routes.post(f"{PATH}/transcription_sessions")
    async def transcription_sessions(body: BetaSessionRequest, request: Request) -> dict[str, Any]:
        """Make a key for a client that opens a transcription session, in the beta."""
        return _beta_secret(sessions, request, body, "beta transcription")

    return routes


def _beta_secret(sessions: Sessions, request: Request, body: BetaSessionRequest, form: SessionForm) -> dict[str, Any]:
    options = body.client_secret or SecretOptions()
    expiry = options.expires_after or options.expires_at or ExpiresAfter(seconds=_BETA_SECONDS)
    set_fields = body.model_dump(exclude_unset=True, exclude={"client_secret"})
    secret, session = _make(sessions, request, set_fields, seconds=expiry.seconds, form=form)
    return {**session, "client_secret": secret}


def _make(
    sessions: Sessions, request: Request, session: dict[str, Any], *, seconds: int, form: SessionForm
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A secret with its expiry, and the session that it opens.

    Raises:
        ApiError: the session is not valid.
    """
    dialect = dialect_of(form)
    key = request.scope.get(API_KEY)
    owner = None if key is None else key.name
    try:
        value, secret = sessions.secrets.make(orjson.dumps(session), seconds=seconds, owner=owner, form=form)
        facts = sessions.session_info(dialect, secret, None)
    except EventError as error:
        raise _refusal(error) from error
    return {"value": value, "expires_at": secret.expires_at}, dialect.session(facts)


def _refusal(error: EventError) -> ApiError:
    kind = NotFound if error.code == "model_not_found" else InvalidRequest
    return kind(error.message, error.param)
