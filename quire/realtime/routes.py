"""WebSocket /v1/realtime, and the endpoints that make client secrets for it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Request, WebSocket
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from quire.api.http.errors import ApiError, InvalidRequest, NotFound
from quire.api.http.routing import CheckedRoute
from quire.api.http.tenant import AUTHENTICATED
from quire.api.protocol.common import ERRORS, ErrorBody
from quire.realtime.dialects.dialect import SessionInfo
from quire.realtime.dialects.openai import OpenAI, OpenAIBeta
from quire.realtime.errors import EventError
from quire.realtime.secrets import Secret
from quire.realtime.sessions import Sessions

PATH = "/v1/realtime"
_BETA_SECONDS = 60  # as of OpenAI's
_UPGRADE_REQUIRED = 426


class ExpiresAfter(BaseModel):
    """When a secret expires."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Field(ge=10, le=7200)] = 600


class ClientSecretRequest(BaseModel):
    """Body of POST /v1/realtime/client_secrets. `session` is a session as in session.update."""

    expires_after: ExpiresAfter | None = None
    session: dict[str, Any] | None = None


class TranscriptionSessionRequest(BaseModel):
    """Body of the beta's POST /v1/realtime/transcription_sessions: a session as in transcription_session.update."""

    input_audio_format: Any = None
    input_audio_transcription: Any = None
    input_audio_noise_reduction: Any = None
    turn_detection: Any = None
    include: Any = None
    modalities: Any = None


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
        value, expires_at, facts = _make(sessions, request, body.session or {}, seconds=seconds, beta=False)
        return {"value": value, "expires_at": expires_at, "session": OpenAI().session(facts)}

    @routes.post(f"{PATH}/transcription_sessions")
    async def transcription_sessions(body: TranscriptionSessionRequest, request: Request) -> dict[str, Any]:
        """Make a key for a client, in the beta."""
        session = body.model_dump(exclude_unset=True)
        value, expires_at, facts = _make(sessions, request, session, seconds=_BETA_SECONDS, beta=True)
        secret = {"value": value, "expires_at": expires_at}
        return {**OpenAIBeta(of_transcription=True).session(facts), "client_secret": secret}

    return routes


def _make(
    sessions: Sessions, request: Request, session: dict[str, Any], *, seconds: int, beta: bool
) -> tuple[str, int, SessionInfo]:
    """A secret, its expiry and the session that it opens.

    Raises:
        ApiError: the session is not valid.
    """
    content = orjson.dumps(session)
    owner = request.scope.get(AUTHENTICATED)
    try:
        value, expires_at = sessions.secrets.make(content, seconds=seconds, owner=owner, beta=beta)
        dialect = OpenAIBeta(of_transcription=True) if beta else OpenAI()
        facts = sessions.session_info(dialect, Secret(expires_at, owner, content, beta, b""), None)
    except EventError as error:
        raise _refusal(error) from error
    return value, expires_at, facts


def _refusal(error: EventError) -> ApiError:
    kind = NotFound if error.code == "model_not_found" else InvalidRequest
    return kind(error.message, error.param)
