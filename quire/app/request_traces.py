"""Traces of HTTP requests and realtime sessions: what their heads say, and how they end."""

from __future__ import annotations

import time
from dataclasses import replace

from starlette.types import Scope

from quire.api.http.error_handlers import CLIENT_CLOSED
from quire.api.http.request_head import endpoint_path
from quire.engine.client.origin import current_origin, set_current_origin
from quire.realtime.routes import PATH as REALTIME
from quire.tracing.requests import RequestTrace
from quire.tracing.span import Attributes
from quire.tracing.tracing import TRANSCRIPTION, Tracing

_SHOWN = 256  # characters of what clients choose
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


def operation_of(scope: Scope) -> str:
    """What a request or a realtime session asks for; empty if it is no work of a model, or its path does not tell."""
    path = endpoint_path(scope)
    if scope["type"] == "websocket":
        return "realtime" if path == REALTIME else ""
    return _OPERATIONS.get(path, "") if scope["method"] == "POST" else ""


def begin_trace(tracing: Tracing, scope: Scope) -> RequestTrace:
    """The trace of a request or a realtime session, of which its head is known. It is that of the current task now."""
    origin = current_origin()
    attributes: Attributes = {
        "http.request.method": scope.get("method", "GET"),
        "url.path": scope["path"][:_SHOWN],
        "url.scheme": scope["scheme"],
        "gen_ai.request.id": origin.request_id,
    }
    if client := scope.get("client"):
        attributes["client.address"] = client[0]
    for name, value in scope["headers"]:
        if name == b"user-agent":
            attributes["user_agent.original"] = value[:_SHOWN].decode("latin-1")
        elif name == b"host":
            attributes |= _address(value[:_SHOWN].decode("latin-1"))
    began = origin.arrived or time.monotonic()
    trace = tracing.begin(began, attributes, parent=origin.client_span, notes=origin.notes)
    set_current_origin(replace(origin, trace=trace.context))
    return trace


def end_trace(tracing: Tracing, trace: RequestTrace, scope: Scope, *, is_complete: bool) -> None:
    """Export the trace of a request, if it is sampled. `is_complete`: all of its answer was sent."""
    if not trace.context.sampled:
        return
    route = getattr(scope.get("route"), "path", "")
    method = str(trace.attributes["http.request.method"])
    trace.name = f"{method} {route}" if route else method
    if route:
        trace.attributes["http.route"] = route
    if endpoint_path(scope) in _ANY_OPERATION and method == "POST":
        kind = trace.notes.answer_id.partition("-")[0]
        trace.notes.operation = _OPERATIONS_OF_ANSWERS.get(kind, kind)
    if scope["type"] == "http" and not trace.error and (not is_complete or trace.status == CLIENT_CLOSED):
        trace.error = _CLIENT_GONE
    tracing.end(trace)


def _address(host: str) -> Attributes:
    """The server as the client has named it, with its port if that has one."""
    name, colon, port = host.rpartition(":")
    if colon and port.isascii() and port.isdigit():
        return {"server.address": name.strip("[]"), "server.port": int(port)}
    return {"server.address": host.strip("[]")}
