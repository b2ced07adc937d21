"""What a replica puts around the app: what Quire's own HTTP server adds to a request, and the prefixes it has seen."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.api.http.request_head import ARRIVED, put_below, request_id_of
from quire.engine.client.replicas.prefix_index import PrefixIndex
from quire.ray.prefixes import unpacked
from quire.ray.proxy import PREFIX


class Ingress:
    """The app as the ingress of a deployment."""

    def __init__(self, app: ASGIApp, held: PrefixIndex) -> None:
        """Wrap the app. `held`: where prefixes of requests are noted."""
        self._app = app
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "lifespan":
            put_below(scope.get("root_path", ""), scope)
            # Ray's proxy has given an id to requests without one, and puts it into the answer.
            state = {ARRIVED: time.monotonic(), "request_id": request_id_of(scope["headers"])}
            scope["state"] = {**scope.get("state", {}), **state}
            if packed := scope.pop(PREFIX, None):
                self._held.add(unpacked(packed))
        await self._app(scope, receive, send)
