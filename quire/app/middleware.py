"""ASGI middleware: limits, host names, headers with the load and for pages of other origins."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.health import probe_response
from quire.api.http.request_head import endpoint_path
from quire.config.options import ServerOptions
from quire.engine.client.protocol import StepStats
from quire.protocol.errors import Misdirected, TooLarge, Unavailable
from quire.serving.models import ServerState

PAGE_FILES = "/page/"
PROBE_PATHS = frozenset({"/health", "/ready", "/ping"})  # need no API key
_PROBES = frozenset({("POST", "/ping"), *((method, path) for method in ("GET", "HEAD") for path in PROBE_PATHS)})
_OWN_NAMES = ("localhost", "*.localhost", "*.internal")  # reserved names that cannot be registered
_FORMAT = "endpoint-load-metrics-format"  # header of requests
_LOAD = "endpoint-load-metrics"  # header of responses
_TIMING_ALLOWANCE = "timing-allow-origin"
UNTRACKED_PATHS = PROBE_PATHS | {"/metrics", "/load", "/version"}
Middleware = Callable[[ASGIApp], ASGIApp]


def apply_middleware(app: ASGIApp, layers: Sequence[Middleware]) -> ASGIApp:
    """The app inside all layers; the first layer is the outermost."""
    for layer in reversed(layers):
        app = layer(app)
    return app


def timing_allowance(origins: Sequence[str]) -> Middleware:
    """Let pages of other origins see how long their requests took, and the header Server-Timing in their tools.

    Scripts read the header as others that are exposed; what browsers measure needs this one. `*`: of all origins.
    """

    def layer(app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            origin = Headers(scope=scope).get("origin", "") if scope["type"] == "http" else ""
            if not origin or (origin not in origins and "*" not in origins):
                await app(scope, receive, send)
                return

            async def with_allowance(message: Message) -> None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message)[_TIMING_ALLOWANCE] = origin
                await send(message)

            await app(scope, receive, with_allowance)

        return handle

    return layer


def refusal_while_draining(state: ServerState) -> Middleware:
    """Refuse new requests while the server shuts down, except health, metrics and version."""
    refusal = Unavailable(
        "The server is shutting down and accepts no new requests.", headers={"Retry-After": "1", "Connection": "close"}
    )

    def layer(app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            if not state.draining or scope["type"] == "lifespan" or endpoint_path(scope) in UNTRACKED_PATHS:
                await app(scope, receive, send)
            else:
                await refusal.response(endpoint_path(scope))(scope, receive, send)

        return handle

    return layer


def probes(state: ServerState) -> Middleware:
    """Answer probes without a search of the routes, which takes five times as long. Thousands may come at once."""

    def layer(app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and (scope["method"], path := endpoint_path(scope)) in _PROBES:
                await probe_response(state, path)(scope, receive, send)
            else:
                await app(scope, receive, send)  # which refuses other methods

        return handle

    return layer


def head_as_get() -> Middleware:
    """Answer HEAD as GET: checks of links, proxies and some clients send it first. uvicorn leaves out the body."""

    def layer(app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "HEAD":
                await app(scope, receive, send)
                return
            as_get = {**scope, "method": "GET"}
            try:
                await app(as_get, receive, send)
            finally:
                scope["route"] = as_get.get("route")  # for the metrics

        return handle

    return layer


def body_limit(maximum: int) -> Middleware:
    """Refuse larger bodies, by their Content-Length or their actual length. Starlette's own responds in plain text."""

    def layer(app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            refusal = TooLarge(f"The body is larger than {maximum} bytes, the limit of this server (--max-body-size).")
            content_length = Headers(scope=scope).get("content-length", "0")
            if content_length.isdigit() and int(content_length) > maximum:  # without reading the body
                await refusal.response(endpoint_path(scope))(scope, receive, send)
                return
            received = 0

            async def counted() -> Message:
                nonlocal received
                message = await receive()
                received += len(message.get("body", b""))
                if received > maximum:
                    raise HTTPException(refusal.status, str(refusal))  # FastAPI converts other exceptions
                return message

            await app(scope, counted, send)

        return handle

    return layer


def host_check(server: ServerOptions) -> Middleware | None:
    """Refuse requests to host names that are not the server's; None if all host names are accepted.

    A web page may make its own host name resolve to this machine (DNS rebinding). It could then read the responses of a
    server without API key.
    """
    if "*" in server.allowed_hosts or not (server.allowed_hosts or _relies_on_loopback(server)):
        return None
    names = [name.lower() for name in (*_OWN_NAMES, *server.allowed_hosts, server.host)]
    exact = frozenset(names)
    suffixes = tuple(name[1:] for name in names if name.startswith("*."))

    def accepts(host: str) -> bool:
        name = _name_of(host)
        return name in exact or name.endswith(suffixes) or _is_address(name)

    def layer(app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            host = Headers(scope=scope).get("host", "") if scope["type"] in ("http", "websocket") else ""
            if not host or accepts(host) or endpoint_path(scope) in PROBE_PATHS:  # browsers always send a host
                await app(scope, receive, send)
            else:
                refusal = Misdirected(
                    f"This server does not accept the host name {_name_of(host)[:100]!r}. "
                    "Add it with --allowed-hosts if clients or a proxy use it."
                )
                await refusal.response(endpoint_path(scope))(scope, receive, send)

        return handle

    return layer


def _relies_on_loopback(server: ServerOptions) -> bool:
    """Return whether nothing protects the server but that it listens on this machine only."""
    if server.uds is not None:
        return False  # browsers do not reach it
    return not server.needs_key and is_on_loopback(server)


def is_on_loopback(server: ServerOptions) -> bool:
    """Return whether the address that the server listens on is one of this machine only."""
    return server.host == "localhost" or _is_address(server.host, loopback=True)


def _name_of(host: str) -> str:
    """The name or address in a Host header, without port and brackets."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")


def _is_address(name: str, *, loopback: bool = False) -> bool:
    try:
        address = ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or not loopback


def orca_header(state: ServerState) -> Middleware:
    """Report the load in responses to requests that ask for it, for load balancers that understand ORCA.

    ORCA (open request cost aggregation) is the format in which Envoy, among others, reads how busy a backend is.
    """

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


def _as_text(load: Mapping[str, float]) -> str:
    return "TEXT " + ", ".join(f"named_metrics.{name}={value:g}" for name, value in load.items())


def _as_json(load: Mapping[str, float]) -> str:
    return "JSON " + json.dumps({"named_metrics": load})


_WRITERS: Mapping[str, Callable[[Mapping[str, float]], str]] = {"TEXT": _as_text, "JSON": _as_json}
