"""The load of the server as a response header, for load balancers that understand ORCA.

ORCA (open request cost aggregation) is the format in which Envoy, among others, reads how busy a backend is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.app.middleware import Middleware
from quire.engine.client.protocol import StepStats
from quire.serving.models import ServerState

_FORMAT = "endpoint-load-metrics-format"  # header of requests
_LOAD = "endpoint-load-metrics"  # header of responses


def orca_header(state: ServerState) -> Middleware:
    """Report the load in responses to requests that ask for it."""

    def layer(app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            format_name = Headers(scope=scope).get(_FORMAT) if scope["type"] == "http" else None
            write = _WRITERS.get(format_name.strip().upper()) if format_name else None
            if write is None:
                await app(scope, receive, send)
                return

            async def with_load(message: Message) -> None:
                if message["type"] == "http.response.start":
                    load = load_of([model.client.stats for model in state.models])
                    MutableHeaders(scope=message)[_LOAD] = write(load)
                await send(message)

            await app(scope, receive, with_load)

        return handle

    return layer


def load_of(stats: Sequence[StepStats]) -> dict[str, float]:
    """The load over all models; the names are vLLM's."""
    blocks = sum(step.blocks_total for step in stats)
    return {
        "kv_cache_usage_perc": sum(step.blocks_used for step in stats) / blocks if blocks else 0.0,
        "num_requests_waiting": sum(step.waiting for step in stats),
    }


def _text(load: Mapping[str, float]) -> str:
    return "TEXT " + ", ".join(f"named_metrics.{name}={value:g}" for name, value in load.items())


def _json(load: Mapping[str, float]) -> str:
    return "JSON " + json.dumps({"named_metrics": load})


_WRITERS: Mapping[str, Callable[[Mapping[str, float]], str]] = {"TEXT": _text, "JSON": _json}
