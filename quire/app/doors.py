"""Doors: the level of each route, and the check of keys before it. Decision 069 has the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.api.http.keys import API_KEY, ApiKey, KeyRing
from quire.api.http.request_head import endpoint_path, foreign_origin, key_of
from quire.app.middleware import PAGE_FILES, PROBE_PATHS, Middleware, is_on_loopback
from quire.config.options import ServerOptions
from quire.engine.client.origin import current_origin, set_current_origin
from quire.protocol.errors import ApiError, PermissionDenied, Unauthorized
from quire.realtime.secrets import CLIENT_SECRET, ClientSecrets


class Level(Enum):
    """Who may use a route."""

    OPEN = "open"  # everybody
    API = "api"  # clients: they need a key, if the server has keys for them
    ADMIN = "admin"  # administrators: what it does concerns all clients


# All routes. A new one must be added here, or a test fails. `GET /` is the page, `POST /` an endpoint of TEI.
ROUTES: Mapping[Level, frozenset[str]] = {
    Level.OPEN: PROBE_PATHS | {"GET /", f"{PAGE_FILES}{{name}}"},
    Level.ADMIN: frozenset(
        (
            *("/sleep", "/wake_up", "/pause", "/resume", "/update_weights", "/update_weights_from_disk"),
            *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/start_profile", "/stop_profile"),
            "/scale_elastic_ep",
        )
    ),
    Level.API: frozenset(
        (
            *("/metrics", "/version", "/load", "/is_sleeping", "/is_paused", "/kv_event_sources"),
            *("/is_scaling_elastic_ep", "/replicas"),
            *("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"),
            *("/v1/models", "/v1/models/{name:path}", "/tokenize", "/detokenize", "/tokenizer_info", "/info"),
            *("/v1/completions", "/v1/completions/render", "/v1/chat/completions", "/v1/chat/completions/render"),
            *("/inference/v1/generate", "/invocations", "/v1/messages", "/v1/messages/count_tokens"),
            *("/v1/messages/render", "/v1/responses/render"),
            *("/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"),
            *("/v1/responses/{response_id}/input_items", "/v1/files", "/v1/files/{file_id}"),
            "/v1/files/{file_id}/content",
            *("/v1/embeddings", "/pooling", "/classify", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"),
            *("/v2/embed", "/embed", "/embed_all", "/embed_sparse", "/predict", "POST /"),
            *("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/languages"),
            *("/v1/realtime", "/v1/realtime/client_secrets", "/v1/realtime/sessions"),
            "/v1/realtime/transcription_sessions",
        )
    ),
}


def level_of(scope: Scope) -> Level:
    """The level of a request. What no route has is of the API: only clients learn that it does not exist.

    Routes of administrators have no parameters, so that a path is compared as the router compares it: the pattern of a
    route, which ends in `$`, also matches a path with a line feed behind it.
    """
    path = endpoint_path(scope).removesuffix("\n")
    if path in ROUTES[Level.ADMIN]:
        return Level.ADMIN
    return Level.OPEN if path in PROBE_PATHS or is_page(scope, path) else Level.API


def doors(keys: KeyRing, secrets: ClientSecrets, server: ServerOptions) -> Middleware:
    """Refuse requests that may not use their route.

    Args:
        keys: of the server.
        secrets: client secrets, which open realtime sessions.
        server: where it listens, and the web pages that may call it.
    """
    is_local = server.uds is not None or is_on_loopback(server)

    def refusal_of_client(scope: Scope, sent: bytes) -> ApiError | None:
        if scope["type"] == "websocket" and API_KEY not in scope:
            _use_secret(scope, keys, secrets, sent)
        return _no_key("API key") if keys.needs_key and API_KEY not in scope else None

    def refusal_of_admin(scope: Scope, headers: Headers) -> ApiError | None:
        key: ApiKey | None = scope.get(API_KEY)
        if key is not None:
            return None if key.is_admin or not keys.needs_admin_key else _not_an_admin_key()
        if keys.needs_admin_key or keys.needs_key:
            return _no_key("admin key" if keys.needs_admin_key else "API key")
        if not is_local:
            return PermissionDenied(
                f"{endpoint_path(scope)} concerns all clients, and this server can be reached from other machines "
                "without a key. Set --admin-api-key or --api-key."
            )
        if origin := foreign_origin(headers, server.allowed_origins):
            return PermissionDenied(f"Pages of {origin[:200]!r} may not call {endpoint_path(scope)}.")
        return None

    def layer(app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan" or (level := level_of(scope)) is Level.OPEN:
                await app(scope, receive, send)
                return
            headers = Headers(scope=scope)
            sent = key_of(headers)
            if (key := keys.find(sent)) is not None:
                _set_key(scope, key)
            refusal = refusal_of_client(scope, sent) if level is Level.API else refusal_of_admin(scope, headers)
            if refusal is None:
                await app(scope, receive, send)
            else:
                await refusal.response(endpoint_path(scope))(scope, receive, send)

        return handle

    return layer


def is_page(scope: Scope, path: str) -> bool:
    """Return whether a request is for the built-in page, which shows nothing without a key."""
    if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
        return False
    return path in ("", "/") or (path.startswith(PAGE_FILES) and "/" not in path.removeprefix(PAGE_FILES))


def _use_secret(scope: Scope, keys: KeyRing, secrets: ClientSecrets, sent: bytes) -> None:
    """Let a client secret stand for the key with which it was made, if both are still valid."""
    secret = secrets.read(sent.decode("latin-1"))
    if secret is None:
        return
    key = keys.named(secret.owner)
    if key is not None:
        _set_key(scope, key)
    if key is not None or secret.owner is None:
        scope[CLIENT_SECRET] = secret


def _set_key(scope: Scope, key: ApiKey) -> None:
    scope[API_KEY] = key
    set_current_origin(replace(current_origin(), key_name=key.name))


def _no_key(kind: str) -> Unauthorized:
    return Unauthorized(f"A valid {kind} is required.", headers={"WWW-Authenticate": "Bearer"})


def _not_an_admin_key() -> PermissionDenied:
    return PermissionDenied(
        "This endpoint concerns all clients and needs an admin key: one of --admin-api-key, or one with `admin = true` "
        "in --api-key-file."
    )
