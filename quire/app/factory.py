"""Builds the ASGI app: routes, error handlers and middleware."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from quire import __version__
from quire.api import health, invocations, models, sleep
from quire.api.anthropic import routes as anthropic
from quire.api.chat import routes as chat
from quire.api.completions import generate
from quire.api.completions import routes as completions
from quire.api.files import routes as files
from quire.api.http.error_handlers import install_error_handlers
from quire.api.http.request_head import REQUEST_ID
from quire.api.http.tenant import api_keys
from quire.api.pooling import cohere, embeddings, rerank, tei
from quire.api.responses import routes as responses
from quire.api.responses.routes import NOT_STORED
from quire.api.responses.service import ResponseService
from quire.api.speech_to_text import routes as speech
from quire.app import page
from quire.app.access_log import AccessLog
from quire.app.middleware import (
    Middleware,
    apply_middleware,
    authentication,
    body_limit,
    host_check,
    orca_header,
    probes,
    refusal_while_draining,
    request_tracking,
    timing_allowance,
)
from quire.app.server_timing import HEADER as SERVER_TIMING
from quire.config.options import LogOptions, ServerOptions
from quire.metrics.prometheus import CONTENT_TYPE, Metrics
from quire.protocol.fields import HEADER as IGNORED_FIELDS
from quire.realtime import routes as realtime
from quire.realtime.sessions import Sessions
from quire.serving.models import ServerState

# headers that scripts of other origins may read
_EXPOSED = (REQUEST_ID, IGNORED_FIELDS, NOT_STORED, "retry-after", SERVER_TIMING)


def create_app(
    state: ServerState,
    metrics: Metrics,
    service: ResponseService,
    sessions: Sessions,
    server: ServerOptions,
    logs: LogOptions,
) -> ASGIApp:
    """The app with all routes and middleware."""
    app = _Documented(title="Quire", version=__version__)
    app.state.strict_fields = server.strict_fields
    app.state.malloc_trimmer = state.malloc_trimmer
    app.state.max_json_values = state.limits.max_json_values
    install_error_handlers(app)
    pooling = (embeddings, rerank, cohere, tei)
    for module in (health, completions, chat, anthropic, generate, *pooling, speech, files, models, sleep, invocations):
        app.include_router(module.router(state))
    app.include_router(responses.router(state, service))
    app.include_router(realtime.router(sessions))
    app.include_router(page.router())

    @app.get("/metrics", response_class=Response)
    async def prometheus() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    layers: list[Middleware] = [request_tracking(state, metrics, AccessLog(logs))]
    if (check := host_check(server)) is not None:
        layers.append(check)
    if server.allowed_origins:
        layers += [_cors(server.allowed_origins), timing_allowance(server.allowed_origins)]
    layers += [orca_header(state), refusal_while_draining(state)]
    if server.api_key:
        layers.append(authentication(api_keys(server.api_key), sessions.secrets.is_valid))
    layers += [body_limit(int(state.limits.max_body_size)), probes(state)]
    return apply_middleware(app, layers)


class _Documented(FastAPI):
    """FastAPI with a corrected OpenAPI schema: validation errors have status 400 here, not 422."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI schema of all endpoints."""
        schema = super().openapi()
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        return schema


def _cors(origins: tuple[str, ...]) -> Middleware:
    def layer(app: ASGIApp) -> ASGIApp:
        return CORSMiddleware(
            app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=_EXPOSED
        )

    return layer
