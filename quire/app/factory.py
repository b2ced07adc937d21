"""Builds the ASGI app: routes, error handlers and middleware."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from quire import __version__
from quire.api import health, invocations, models, operation, sleep
from quire.api.anthropic import routes as anthropic
from quire.api.chat import routes as chat
from quire.api.completions import generate
from quire.api.completions import routes as completions
from quire.api.files import routes as files
from quire.api.http.error_handlers import install_error_handlers
from quire.api.http.key_usage import LIMIT_HEADERS
from quire.api.http.keys import KeyRing
from quire.api.http.request_head import REQUEST_ID, endpoint_path
from quire.api.pooling import cohere, embeddings, rerank, tei
from quire.api.responses import routes as responses
from quire.api.responses.routes import NOT_STORED
from quire.api.responses.service import ResponseService
from quire.api.speech_to_text import routes as speech
from quire.app import page
from quire.app.access_log import AccessLog
from quire.app.doors import doors
from quire.app.middleware import (
    Middleware,
    apply_middleware,
    body_limit,
    head_as_get,
    host_check,
    orca_header,
    probes,
    refusal_while_draining,
    timing_allowance,
)
from quire.app.rate_limits import rate_limits
from quire.app.server_timing import HEADER as SERVER_TIMING
from quire.app.tracking import request_tracking
from quire.config.options import LogOptions, ServerOptions
from quire.metrics.exposition import Exposition
from quire.metrics.prometheus import Metrics
from quire.protocol.errors import NotFound, shorten
from quire.protocol.fields import HEADER as IGNORED_FIELDS
from quire.realtime import routes as realtime
from quire.realtime.sessions import Sessions
from quire.serving.models import ServerState
from quire.tracing.tracing import Tracing

# headers that scripts of other origins may read
_EXPOSED = (REQUEST_ID, IGNORED_FIELDS, NOT_STORED, "retry-after", SERVER_TIMING, *LIMIT_HEADERS)


def create_app(
    routes: FastAPI,
    state: ServerState,
    metrics: Metrics,
    sessions: Sessions,
    server: ServerOptions,
    keys: KeyRing,
    logs: LogOptions,
    tracing: Tracing | None = None,
    exposition: Exposition | None = None,
) -> ASGIApp:
    """The app with all routes and middleware.

    Args:
        routes: see `create_routes`.
        tracing: traces requests; None: they are not traced.
        exposition: renders metrics; None: those of this process.
    """
    if not state.renders_only:
        routes.include_router(realtime.router(sessions))
    _add_exposition(routes, exposition or Exposition(metrics))
    layers: list[Middleware] = [request_tracking(state, metrics, AccessLog(logs), tracing)]
    if (check := host_check(server)) is not None:
        layers.append(check)
    if server.allowed_origins:
        layers += [_cors(server.allowed_origins), timing_allowance(server.allowed_origins)]
    layers += [orca_header(state), refusal_while_draining(state)]
    layers += [doors(keys, sessions.secrets, server), rate_limits(metrics)]
    layers += [body_limit(int(state.limits.max_body_size)), probes(state), head_as_get()]
    return apply_middleware(routes, layers)


def create_routes(state: ServerState, service: ResponseService, server: ServerOptions) -> FastAPI:
    """The routes that can be made while the models load: all but those of metrics and of realtime sessions."""
    # FastAPI's own traces would be second ones if the environment sets a provider, and its logs have what it refuses.
    nothing: Any = {"tracing": False, "metrics": False, "logs": False}
    app = _Documented(title="Quire", version=__version__, telemetry=nothing)
    app.state.strict_fields = server.strict_fields
    app.state.malloc_trimmer = state.malloc_trimmer
    app.state.max_json_values = state.limits.max_json_values
    install_error_handlers(app)
    for routes in _render_routers(state, service):
        app.include_router(routes)
    if state.renders_only:
        app.router.default = _refuse_others
    else:
        for routes in _engine_routers(state, service):
            app.include_router(routes)
    return app


def _add_exposition(app: FastAPI, exposition: Exposition) -> None:
    @app.get("/metrics", response_class=Response)
    async def prometheus(request: Request) -> Response:
        """Metrics in Prometheus' text format, or in OpenMetrics if the Accept header names it."""
        headers = request.headers
        page = await exposition.page(headers.get("accept", ""), headers.get("accept-encoding", ""))
        return Response(page.body, headers=page.headers)


def _render_routers(state: ServerState, service: ResponseService) -> list[APIRouter]:
    """The routers of a server that renders prompts."""
    return [
        health.router(state),
        generate.render_router(state),
        anthropic.render_router(state),
        responses.render_router(state, service),
        models.router(state),
    ]


def _engine_routers(state: ServerState, service: ResponseService) -> list[APIRouter]:
    """The routers that a server with an engine has beside those."""
    pooling = (embeddings, rerank, cohere, tei)
    modules = (completions, chat, anthropic, generate, *pooling, speech, files, sleep, operation, invocations)
    return [
        *(module.router(state) for module in modules),
        responses.router(state, service),
        page.router(),
    ]


async def _refuse_others(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer requests that no route of a server that renders prompts has."""
    path = endpoint_path(scope)
    refusal = NotFound(
        f"This server renders prompts (quire render) and runs no model: it has no {shorten(path)}, which a server of "
        "`quire serve` may have."
    )
    answer = refusal.response(path) if scope["type"] == "http" else WebSocketClose()
    await answer(scope, receive, send)


class _Documented(FastAPI):
    """FastAPI with a corrected OpenAPI schema: validation errors have status 400 here, not 422."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI schema of all endpoints."""
        schema = super().openapi()
        for methods in schema["paths"].values():
            for described in methods.values():
                described["responses"].pop("422", None)
        return schema


def _cors(origins: tuple[str, ...]) -> Middleware:
    def layer(app: ASGIApp) -> ASGIApp:
        return CORSMiddleware(
            app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=_EXPOSED
        )

    return layer
