"""Traces of HTTP requests and realtime sessions: what their heads say, and how they end."""

from __future__ import annotations

import time

from starlette.types import Scope

from quire.api.http.error_handlers import CLIENT_CLOSED
from quire.api.http.request_head import endpoint_path
from quire.engine.client.origin import current_origin
from quire.realtime.routes import PATH as REALTIME
from quire.tracing.requests import RequestHead, RequestTrace
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
    """The trace of a request or a realtime session, which has just arrived. It is that of the current task now."""
    origin = current_origin()
    trace = tracing.begin(
        origin.arrived or time.monotonic(),
        lambda: _head(scope, origin.request_id).attributes(),
        parent=origin.client_span,
        notes=origin.notes,
    )
    origin.trace = trace.context
    return trace


def end_trace(tracing: Tracing, trace: RequestTrace, scope: Scope, *, is_complete: bool) -> None:
    """Export the trace of a request, if it is sampled. `is_complete`: all of its answer was sent."""
    if not trace.context.sampled:
        return
    trace.head = _head(scope, current_origin().request_id)
    trace.route = getattr(scope.get("route"), "path", "")
    is_http = scope["type"] == "http"
    if not trace.notes.operation and is_http and endpoint_path(scope) in _ANY_OPERATION and scope["method"] == "POST":
        kind = trace.notes.answer_id.partition("-")[0]
        trace.notes.operation = _OPERATIONS_OF_ANSWERS.get(kind, kind)
    if is_http and not trace.error and (not is_complete or trace.status == CLIENT_CLOSED):
        trace.error = _CLIENT_GONE
    tracing.end(trace)


def _head(scope: Scope, request_id: str) -> RequestHead:
    user_agent = host = None
    for name, value in scope["headers"]:
        if name == b"user-agent":
            user_agent = value[:_SHOWN]
        elif name == b"host":
            host = value[:_SHOWN]
    client = scope.get("client")
    return RequestHead(
        request_id=request_id,
        method=scope.get("method", "GET"),
        path=scope["path"][:_SHOWN],
        scheme=scope["scheme"],
        client=client[0] if client else "",
        user_agent=user_agent,
        host=host,
    )
