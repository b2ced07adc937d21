"""All sessions of a server: who may open one, how many there may be, and how they end."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import nullcontext, suppress
from dataclasses import replace

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from quire.api.http.keys import API_KEY
from quire.api.http.request_head import (
    KEY_PROTOCOL,
    endpoint_path,
    foreign_origin,
    key_of,
    subprotocols,
)
from quire.api.http.tenant import set_tenant
from quire.config.options import RealtimeOptions, ServerOptions
from quire.metrics.prometheus import Metrics
from quire.protocol.errors import (
    ApiError,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    TooManyRequests,
    Unauthorized,
)
from quire.realtime.captions import UtteranceTrace
from quire.realtime.client_events import SessionUpdate, TranscriptionSessionUpdate
from quire.realtime.dialects.choice import DialectChoice, guess
from quire.realtime.dialects.dialect import Dialect, SessionInfo
from quire.realtime.dialects.openai import OpenAI, OpenAIBeta
from quire.realtime.errors import EventError, SessionEnded
from quire.realtime.secrets import CLIENT_SECRET, PREFIX, ClientSecrets, Secret, SessionForm
from quire.realtime.session import Session, SharedContext, check_settings
from quire.realtime.turn_detection import SpeechDetectorOf, voice_activity
from quire.realtime.utterance_transcriber import TranscriberOf
from quire.serving.models import ServerState
from quire.workers.shares import Refusal, Shares
from quire.workers.tenant import current_tenant

logger = logging.getLogger(__name__)
_INTERIM_PASSES = 8  # over utterances that are being spoken, of all sessions at once
_FAREWELL_SECONDS = 5.0
_FAILED = 1011  # close code: an unexpected condition
_PROTOCOL = "realtime"


class Sessions:
    """The sessions of a server. Created on the event loop that serves."""

    def __init__(
        self,
        state: ServerState,
        options: RealtimeOptions,
        server: ServerOptions,
        metrics: Metrics,
        transcriber_of: TranscriberOf,
        share: float = 1.0,
        detector_of: SpeechDetectorOf = voice_activity,
        utterance_trace: UtteranceTrace = nullcontext,
        places: Shares | None = None,
        secrets: ClientSecrets | None = None,
    ) -> None:
        """Begin without sessions.

        Args:
            state: of the server.
            options: of sessions.
            server: its keys, and who may call it.
            metrics: count sessions.
            transcriber_of: makes the transcribers of sessions.
            share: of the places of sessions, for one tenant.
            detector_of: makes what detects turns.
            utterance_trace: the trace of an utterance.
            places: of sessions, if several processes count them.
            secrets: those of clients, if several processes accept them.
        """
        self.secrets = secrets or ClientSecrets()
        self._options = options
        self._server = server
        self._metrics = metrics
        self._places = places or Shares(options.max_realtime_sessions, share)
        self.shared = SharedContext(
            state,
            options,
            transcriber_of,
            detector_of,
            asyncio.Semaphore(_INTERIM_PASSES),
            asyncio.Event(),
            utterance_trace,
        )

    @property
    def running(self) -> int:
        """Number of sessions that have not ended."""
        return self._places.used_here

    def drain(self) -> None:
        """End all sessions once what was said in them is transcribed."""
        self.shared.draining.set()

    async def serve(self, websocket: WebSocket) -> None:
        """Open a session for a client and run it to its end, or refuse the client before the upgrade."""
        try:
            choice, facts = self._open(websocket)
            tenant = current_tenant()
            self._check_place(self._places.take_if_free(tenant), tenant)
        except ApiError as error:
            await error.response(endpoint_path(websocket.scope))(websocket.scope, websocket.receive, websocket.send)
            return
        started = time.monotonic()
        self._metrics.realtime_sessions.inc()
        self._metrics.realtime_opened.inc()
        try:
            await self._serve(websocket, Session(websocket, self.shared, choice, facts))
        finally:
            self._places.give_back(tenant)
            self._metrics.realtime_sessions.dec()
            self._metrics.realtime_seconds.observe(time.monotonic() - started)

    def session_info(self, dialect: Dialect, secret: Secret | None, model: str | None) -> SessionInfo:
        """A new session. With a secret, `dialect` is that of `dialect_of`.

        Raises:
            EventError: its settings are not possible.
        """
        settings = dialect.defaults
        if model:
            settings = replace(settings, model=model)
        if secret is not None:
            kind = TranscriptionSessionUpdate if secret.form == "beta transcription" else SessionUpdate
            settings = dialect.updated_settings(kind(session=msgspec.Raw(secret.session)), settings)
        if dialect.commits_end_utterances:
            check_settings(self.shared, dialect, settings)
        seconds = self._options.realtime_session_timeout
        return SessionInfo(settings, int(time.time() + seconds) if seconds else None)

    def _open(self, websocket: WebSocket) -> tuple[DialectChoice, SessionInfo]:
        """Return what a session starts with.

        Raises:
            ApiError: it may not start.
        """
        secret = self._secret(websocket)
        set_tenant(websocket.scope)
        self._check_place(self._places.refusal(current_tenant()), current_tenant())
        if secret is None:
            self._check_origin(websocket)
        query = websocket.query_params
        if "call_id" in query:
            raise InvalidRequest("`call_id` is not supported: this server has no SIP or WebRTC calls.", "call_id")
        dialect = guess(websocket.headers, query, subprotocols(websocket.headers))
        if secret is not None:
            dialect = dialect_of(secret.form)
        try:
            return DialectChoice(dialect), self.session_info(dialect, secret, query.get("model"))
        except EventError as error:
            kind = NotFound if error.code == "model_not_found" else InvalidRequest
            raise kind(error.message, error.param) from error

    def _check_place(self, refusal: Refusal | None, tenant: str) -> None:
        """Refuse a session for which there is no place: there are too many, of all clients or of this one.

        Raises:
            ApiError: there are.
        """
        retry = {"Retry-After": "5"}
        match refusal:
            case "full":
                raise Overloaded(
                    f"The server has {self._places.used} realtime sessions and accepts no more "
                    "(--max-realtime-sessions).",
                    headers=retry,
                )
            case "share":
                raise TooManyRequests(
                    f"This client has {self._places.held(tenant)} of the server's {self._places.capacity} realtime "
                    "sessions, and may have no more at the moment (--max-client-share).",
                    headers=retry,
                )

    def _secret(self, websocket: WebSocket) -> Secret | None:
        scope = websocket.scope
        if CLIENT_SECRET in scope or API_KEY in scope:  # the key was checked before
            checked: Secret | None = scope.get(CLIENT_SECRET)
            return checked
        key = key_of(websocket.headers).decode("latin-1")
        if not key.startswith(PREFIX):
            return None
        secret = self.secrets.read(key)
        if secret is None:
            raise Unauthorized("The client secret is not valid, or has expired.")
        return secret

    def _check_origin(self, websocket: WebSocket) -> None:
        """Refuse web pages of other origins while no API key keeps them out: browsers let them open WebSockets.

        Raises:
            ApiError: the page is not one of this server, or of --allowed-origins.
        """
        if self._server.needs_key:
            return
        if origin := foreign_origin(websocket.headers, self._server.allowed_origins):
            raise PermissionDenied(f"Pages of {origin[:200]!r} may not open sessions; see --allowed-origins.")

    async def _serve(self, websocket: WebSocket, session: Session) -> None:
        offered = [name for name in subprotocols(websocket.headers) if name]
        # A browser that has offered protocols needs one of them.
        chosen = _PROTOCOL if _PROTOCOL in offered else next(iter(_public(offered) or offered), None)
        try:
            await websocket.accept(chosen)
            over = await session.run()
        except Exception:
            logger.exception("a realtime session failed")
            over = SessionEnded(_FAILED, "Internal server error", "server_error")
        if over.code is None:
            return
        # The client may be slow, or gone: then the connection is closed without a word.
        with suppress(TimeoutError, WebSocketDisconnect, RuntimeError):
            async with asyncio.timeout(_FAREWELL_SECONDS):
                for body in session.closing_events(over):
                    await websocket.send_json(body)
                await websocket.close(over.code, over.reason[:120])


def dialect_of(form: SessionForm) -> OpenAI:
    """The dialect of sessions that a secret of this form opens."""
    return OpenAI() if form == "ga" else OpenAIBeta(of_transcription=form == "beta transcription")


def _public(offered: list[str]) -> list[str]:
    return [name for name in offered if not name.startswith(KEY_PROTOCOL)]
