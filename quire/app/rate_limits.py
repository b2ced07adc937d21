"""Limits of API keys: requests beyond them are refused, and the others tell their client what is left."""

from __future__ import annotations

import math

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from quire.api.http.keys import API_KEY, ApiKey, KeyRing
from quire.api.http.request_head import endpoint_path
from quire.app.doors import Level, level_of
from quire.app.middleware import UNTRACKED_PATHS, Middleware
from quire.engine.client.records import Observer, RequestRecord
from quire.metrics.prometheus import Metrics
from quire.protocol.errors import TooManyRequests

_RESPONSES = ("http.response.start", "websocket.accept")  # messages that begin an answer


def rate_limits(metrics: Metrics) -> Middleware:
    """Refuse requests of keys that have reached one of their limits. What probes and administrators send is exempt."""

    def layer(app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            key: ApiKey | None = scope.get(API_KEY)
            if key is None or not key.usage.is_limited or _is_exempt(scope):
                await app(scope, receive, send)
                return
            usage = key.usage
            if (excess := usage.begin()) is not None:
                metrics.rate_limited.labels(key.name, excess.reason).inc()
                headers = {"Retry-After": str(math.ceil(excess.seconds)), **usage.headers()}
                refusal = TooManyRequests(excess.message, headers=headers)
                await refusal.response(endpoint_path(scope))(scope, receive, send)
                return

            async def with_headers(message: Message) -> None:
                if message["type"] in _RESPONSES:
                    message.setdefault("headers", [])
                    MutableHeaders(scope=message).update(usage.headers())
                await send(message)

            try:
                await app(scope, receive, with_headers)
            finally:
                usage.end()

        return handle

    return layer


def _is_exempt(scope: Scope) -> bool:
    return level_of(scope) is not Level.API or endpoint_path(scope) in UNTRACKED_PATHS


class TokenCounter(Observer):
    """Counts the tokens of finished sequences for the key that has asked for them."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    @override
    def on_finish(self, record: RequestRecord) -> None:
        if (key := self._keys.named(record.origin.key_name)) is not None:
            key.usage.use_tokens(record.prompt_tokens - record.cached_tokens + record.output_tokens)
