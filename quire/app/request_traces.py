"""Middleware that traces requests: what their heads say, and how they end."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.http.request_head import ARRIVED, NOTES, TRACE, endpoint_path
from quire.app.doors import is_page
from quire.app.middleware import UNTRACKED_PATHS, Middleware
from quire.engine.client.trace_context import TraceContext
from quire.realtime.routes import PATH as REALTIME
from quire.tracing.requests import RequestTrace
from quire.tracing.span import Attributes
from quire.tracing.tracing import TRANSCRIPTION, Tracing

_SHOWN = 256  # characters of what clients choose
_MOST_PARENT = 128  # bytes of a traceparent that may be valid
_SWITCHING_PROTOCOLS = 101
_DISCONNECTED = 499  # status for logs and metrics; the response is not read
_CLIENT_GONE = "client_disconnected"
_CHAT, _EMBEDDINGS, _COMPLETION = "chat", "embeddings", "text_completion"
# By the names of the conventions, where they have one.
_OPERATIONS = {
    "/v1/chat/completions": _CHAT,
    "/v1/responses": _CHAT,
    "/v1/messages": _CHAT,
    "/v1/completions": _COMPLETION,
    "/inference/v1/generate": _COMPLETION,
    "/v1/embeddings": _EMBEDDINGS,
    "/v2/embed": _EMBEDDINGS,
    "/embed": _EMBEDDINGS,
    "/embed_all": _EMBEDDINGS,
    "/embed_sparse": _EMBEDDINGS,
    "/pooling": "pooling",
    "/classify": "classify",
    "/predict": "classify",
    "/score": "score",
    "/v1/score": "score",
    "/rerank": "rerank",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/v1/audio/transcriptions": TRANSCRIPTION,
    "/v1/audio/translations": "translation",
    "/v1/audio/languages": "language_detection",
}
# Of requests whose path does not tell, by the beginning of the id of their answer.
_OPERATIONS_OF_ANSWERS = {
    "chatcmpl": _CHAT,
    "cmpl": _COMPLETION,
    "embd": _EMBEDDINGS,
    "embed": _EMBEDDINGS,
    "pool": "pooling",
    "predict": "classify",
}
_ANY_OPERATION = ("/", "/invocations")


def request_traces(tracing: Tracing) -> Middleware:
    """Trace requests and realtime sessions, except probes, metrics and the files of the page."""

    def layer(app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            path = endpoint_path(scope)
            if scope["type"] == "lifespan" or path in UNTRACKED_PATHS or is_page(scope, path):
                await app(scope, receive, send)
                return
            state = scope["state"]
            trace = _begin(tracing, scope)
            state[TRACE], state[NOTES] = trace.context, trace.notes
            if not trace.context.sampled:
                await app(scope, receive, send)
                return
            complete = False

            async def observed(message: Message) -> None:
                nonlocal complete
                match message["type"]:
                    case "http.response.start" | "websocket.http.response.start":
                        trace.status = message["status"]
                    case "websocket.accept":
                        trace.status = _SWITCHING_PROTOCOLS
                    case "http.response.body" | "websocket.http.response.body":
                        complete = not message.get("more_body", False)
                await send(message)

            try:
                await app(scope, receive, observed)
            except BaseException as error:
                trace.error, trace.failed = type(error).__name__, True
                raise
            finally:
                _end(tracing, trace, scope, complete=complete)

        return handle

    return layer


def _begin(tracing: Tracing, scope: Scope) -> RequestTrace:
    """The trace of a request of which nothing is known but its head."""
    parents, states = list[bytes](), list[bytes]()
    attributes: Attributes = {
        "http.request.method": scope.get("method", "GET"),
        "url.path": scope["path"][:_SHOWN],
        "url.scheme": scope["scheme"],
        "gen_ai.request.id": scope["state"]["request_id"],
    }
    if client := scope.get("client"):
        attributes["client.address"] = client[0]
    for name, value in scope["headers"]:
        match name:
            case b"traceparent":
                parents.append(value)
            case b"tracestate":
                states.append(value)
            case b"user-agent":
                attributes["user_agent.original"] = value[:_SHOWN].decode("latin-1")
            case b"host":
                attributes |= _address(value[:_SHOWN].decode("latin-1"))
    parent = None
    if len(parents) == 1 and len(parents[0]) <= _MOST_PARENT:
        parent = TraceContext.parse(parents[0].decode("latin-1"), b",".join(states).decode("latin-1"))
    began = scope["state"].get(ARRIVED) or time.monotonic()
    path = endpoint_path(scope)
    if scope["type"] == "websocket":
        operation = "realtime" if path == REALTIME else ""
    else:
        operation = _OPERATIONS.get(path, "") if scope["method"] == "POST" else ""
    return tracing.begin(began, attributes, parent=parent, operation=operation)


def _end(tracing: Tracing, trace: RequestTrace, scope: Scope, *, complete: bool) -> None:
    route = getattr(scope.get("route"), "path", "")
    method = str(trace.attributes["http.request.method"])
    trace.name = f"{method} {route}" if route else method
    if route:
        trace.attributes["http.route"] = route
    if endpoint_path(scope) in _ANY_OPERATION and method == "POST":
        kind = trace.notes.answer_id.partition("-")[0]
        trace.operation = _OPERATIONS_OF_ANSWERS.get(kind, kind)
    if scope["type"] == "http" and not trace.error and (not complete or trace.status == _DISCONNECTED):
        trace.error = _CLIENT_GONE
    tracing.end(trace)


def _address(host: str) -> Attributes:
    """The server as the client has named it, with its port if that has one."""
    name, colon, port = host.rpartition(":")
    if colon and port.isascii() and port.isdigit():
        return {"server.address": name.strip("[]"), "server.port": int(port)}
    return {"server.address": host.strip("[]")}
