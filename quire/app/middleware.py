"""ASGI middleware: metrics, limits, host names, the header with the load."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from http import HTTPStatus
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.health import probe_response
from quire.api.http.request_head import endpoint_path, set_origin
from quire.api.http.sse import RAW_SEND
from quire.app.access_log import AccessLog
from quire.app.server_timing import HEADER as SERVER_TIMING
from quire.app.server_timing import server_timing
from quire.config.options import ServerOptions
from quire.engine.client.origin import current_origin
from quire.engine.client.protocol import StepStats
from quire.metrics.prometheus import Metrics, exemplar_of
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


def request_tracking(state: ServerState, metrics: Metrics, access_log: AccessLog) -> Middleware:
    """Record the count and duration of requests, and say in each answer where its time went."""

    def layer(app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await app(scope, receive, send)
                return
            is_logged = access_log.includes(scope)
            is_counted = scope["type"] == "http" and endpoint_path(scope) not in UNTRACKED_PATHS
            if not is_logged and not is_counted:
                await app(scope, receive, send)
                return
            answer = _Answer(send, with_timing=is_counted)
            try:
                with _counted(scope, send, answer) if is_counted else nullcontext():
                    await app(scope, receive, answer.send)
            finally:
                if is_logged:
                    access_log.write(scope, answer.status, is_complete=answer.is_complete)

        @contextmanager
        def _counted(scope: Scope, send: Send, answer: _Answer) -> Iterator[None]:
            """A context in which a request is answered."""
            set_origin(scope)
            scope[RAW_SEND] = send
            started = time.monotonic()
            state.in_flight += 1
            try:
                yield
            finally:
                del scope[RAW_SEND]  # a cycle: what sends refers to the scope
                state.in_flight -= 1
                handler = getattr(scope.get("route"), "path", "unmatched")
                metrics.http_requests.labels(scope["method"], handler, f"{answer.status // 100}xx").inc()
                seconds = time.monotonic() - started
                metrics.http_seconds.labels(scope["method"], handler).observe(seconds, exemplar_of(current_origin()))

        return handle

    return layer


class _Answer:
    """Send the answer to a request, with the header Server-Timing.

    Attributes:
        status: its status; 499 if the client disconnects before it begins.
        is_complete: all of it was sent.
    """

    def __init__(self, send: Send, *, with_timing: bool) -> None:
        self.status = 499
        self.is_complete = False
        self._send = send
        self._with_timing = with_timing

    async def send(self, message: Message) -> None:
        """Send a part of the answer."""
        match message["type"]:
            case "http.response.start":
                self.status = message["status"]
                origin = current_origin()
                if self._with_timing and origin.arrived:
                    MutableHeaders(scope=message)[SERVER_TIMING] = server_timing(origin)
            case "http.response.body" | "websocket.http.response.body":
                self.is_complete = not message.get("more_body", False)
            case "websocket.http.response.start":
                self.status = message["status"]
            case "websocket.accept":
                self.status, self.is_complete = HTTPStatus.SWITCHING_PROTOCOLS, True
        await self._send(message)


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
