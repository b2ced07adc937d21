"""POST /invocations, which Amazon SageMaker calls: a chat or a completion, by the fields of the body."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Discriminator, Tag
from starlette.responses import Response

from quire.api.chat.routes import answer_chat
from quire.api.completions.routes import answer_completion
from quire.api.http.routing import CheckedRoute
from quire.api.protocol.chat import ChatCompletion, ChatRequest
from quire.api.protocol.common import streamed
from quire.api.protocol.completions import Completion, CompletionRequest
from quire.api.serving.models import ServerState

_CHAT, _COMPLETION = "a chat", "a completion"  # names that are no fields, as they are left out of errors


def _kind(body: Any) -> str | None:
    if not isinstance(body, dict):
        return None
    return _CHAT if "messages" in body else _COMPLETION if "prompt" in body else None


_Invocation = Annotated[
    Annotated[ChatRequest, Tag(_CHAT)] | Annotated[CompletionRequest, Tag(_COMPLETION)],
    Discriminator(
        _kind,
        custom_error_type="no_handler",
        custom_error_message="Expected an object with `messages`, for a chat, or `prompt`, for a completion",
    ),
]


def router(state: ServerState) -> APIRouter:
    """The endpoint."""
    routes = APIRouter(route_class=CheckedRoute)

    @routes.post("/invocations", responses=streamed(ChatCompletion | Completion), response_model=None)
    async def invoke(body: _Invocation, request: Request) -> Response:
        """Answer a conversation, or continue prompts."""
        if isinstance(body, ChatRequest):
            return await answer_chat(body, request, state)
        return await answer_completion(body, request, state)

    return routes
