"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.api.anthropic.translation import (
    MessageStreamWriter,
    content_blocks,
    error_event,
    messages_usage,
    stop_fields,
    to_chat_request,
)
from quire.api.chat.conversation import unused_template_fields
from quire.api.chat.prepare import PreparedChat, prepare_chat, render_chat
from quire.api.chat.rendered import rendered_chat
from quire.api.http.admission import admit
from quire.api.http.request_head import answer_id
from quire.api.http.routing import CheckedRoute, releaser
from quire.api.http.sse import EventStream, respond_unless_disconnected, unless_disconnected
from quire.parsing.answer import AnswerParser
from quire.protocol import fields
from quire.protocol.anthropic import (
    AnthropicError,
    Conversation,
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    TokenCount,
)
from quire.protocol.common import ERRORS, openapi_stream
from quire.protocol.generate import RenderedPrompt
from quire.rendering.prompts import EFFORT, THINKING_SWITCHES
from quire.serving.generation import collect, generate_all
from quire.serving.kv_transfer import answer_params
from quire.serving.models import ServerState

# Set for every template, whether it reads them or not.
_SWITCHES = frozenset(f"chat_template_kwargs.{name}" for name in THINKING_SWITCHES)
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": AnthropicError, "description": about["description"]} for status, about in ERRORS.items()
}


def router(state: ServerState) -> APIRouter:
    """A router with the endpoints of Anthropic's messages."""
    routes = APIRouter(route_class=CheckedRoute)

    @routes.post("/v1/messages", responses={**openapi_stream(MessagesResponse), **_ERRORS}, response_model=None)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation."""
        model = state.generating_model(body.model)
        admit(request, model, 1, "messages")
        response_id = answer_id("msg", request, None)
        chat, source = to_chat_request(body)
        with source.errors():
            prepared = await unless_disconnected(request, prepare_chat(chat, model, state, response_id))
        # they may be large, and are not needed any more
        body.messages = []
        body.tools = None
        fields.ignore(request, [*_unused(prepared.unused_fields), *body.without_effect])
        if body.stream:
            return EventStream(
                _events(prepared, releaser(request), has_metrics=state.include_metrics),
                keepalive=state.sse_keep_alive_interval,
                error=error_event,
                done=b"",
            )
        return await respond_unless_disconnected(request, _message(prepared, has_metrics=state.include_metrics))

    return routes


def render_router(state: ServerState) -> APIRouter:
    """A router with the endpoints that generate nothing."""
    routes = APIRouter(route_class=CheckedRoute)

    @routes.post("/v1/messages/render", responses=_ERRORS)
    async def render_message(body: MessagesRequest, request: Request) -> RenderedPrompt:
        """Render and tokenize a conversation without generating anything."""
        model = state.generating_model(body.model)
        response_id = answer_id("msg", request, None)
        chat, source = to_chat_request(body)
        with source.errors():
            prepared = await unless_disconnected(request, prepare_chat(chat, model, state, response_id))
        fields.ignore(request, [*_unused(prepared.unused_fields), *body.without_effect])
        return rendered_chat(prepared)

    @routes.post("/v1/messages/count_tokens", responses=_ERRORS)
    async def count_tokens(body: Conversation, request: Request) -> TokenCount:
        """Count the tokens of a rendered conversation."""
        chat, source = to_chat_request(body)
        model = state.generating_model(chat.model)
        with source.errors():
            prompt = await unless_disconnected(request, render_chat(chat, model, state, 0))
        unused = [*unused_template_fields(chat, prompt.rendered), *prompt.unused_fields]
        fields.ignore(request, [*_unused(unused), *body.without_effect])
        return TokenCount(input_tokens=len(prompt.prompt.token_ids))

    return routes


def _unused(names: Sequence[str]) -> list[str]:
    """Names of fields that have no effect, as a client of this API knows them."""
    efforts = {f"chat_template_kwargs.{EFFORT}": "output_config.effort"}
    return [efforts.get(name, name) for name in names if name not in _SWITCHES]


async def _message(prepared: PreparedChat, *, has_metrics: bool) -> MessagesResponse:
    usage = prepared.usage_counter()
    parser = prepared.parser("other", streams=False)
    (result,) = await collect(prepared.model.client, prepared.requests)
    total = result.total
    usage.add(0, total)
    parsed = parser.push(result.text, last=True)
    stop_reason, stop_sequence = stop_fields(_finish_reason(parser, total.finish_reason), total.stop_reason)
    return MessagesResponse(
        id=prepared.head.id,
        model=prepared.head.model,
        content=content_blocks(parsed, thinking=prepared.body.include_reasoning),
        stop_reason=stop_reason,
        stop_sequence=stop_sequence,
        usage=messages_usage(usage),
        metrics=usage.metrics() if has_metrics else None,
        kv_transfer_params=answer_params(total.held_blocks),
    )


async def _events(
    prepared: PreparedChat, ended: Callable[[], None], *, has_metrics: bool
) -> AsyncGenerator[bytes, None]:
    head = prepared.head
    counter = prepared.usage_counter()
    parser = prepared.parser("other", streams=True)
    usage = MessagesUsage(input_tokens=len(prepared.prompt.token_ids), output_tokens=0)
    message = MessagesResponse(id=head.id, model=head.model, content=[], stop_reason=None, usage=usage)
    writer = MessageStreamWriter(message, thinking=prepared.body.include_reasoning)
    yield writer.begin()
    async with aclosing(generate_all(prepared.model.client, prepared.requests, ended)) as deltas:
        async for _, delta in deltas:
            counter.add(0, delta)
            for event in writer.write(parser.push(delta.text, last=delta.finish_reason is not None)):
                yield event
            if delta.finish_reason is not None:
                stop = stop_fields(_finish_reason(parser, delta.finish_reason), delta.stop_reason)
                metrics = counter.metrics() if has_metrics else None
                for event in writer.end(*stop, messages_usage(counter), metrics):
                    yield event


def _finish_reason(parser: AnswerParser, reason: str | None) -> str | None:
    """The finish reason; unlike in OpenAI's API, a call of a named tool is a tool call as well."""
    reason = parser.finish_reason(reason)
    return "tool_calls" if reason == "stop" and parser.called else reason
