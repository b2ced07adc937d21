"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.api.anthropic.translation import BlockWriter, as_chat, blocks_of, error_event, stop_of, usage_of
from quire.api.chat.conversation import conversation_of, unread_fields
from quire.api.chat.prepare import ChatCall, prepare_chat
from quire.api.http import fields
from quire.api.http.body import StrictRoute
from quire.api.http.identity import answer_id
from quire.api.http.sse import EventStream, answer
from quire.api.protocol.anthropic import (
    AnsweredMessage,
    AnthropicError,
    Conversation,
    MessagesRequest,
    MessagesUsage,
    TokenCount,
)
from quire.api.protocol.common import ERRORS, streamed
from quire.api.serving.generation import admit, collect, run
from quire.api.serving.models import Services

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": AnthropicError, "description": about["description"]} for status, about in ERRORS.items()
}


def router(services: Services) -> APIRouter:
    """The endpoints."""
    routes = APIRouter(route_class=StrictRoute)

    @routes.post("/v1/messages", responses={**streamed(AnsweredMessage), **_ERRORS}, response_model=None)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation."""
        call = await prepare_chat(as_chat(body), services, answer_id("msg", request, None))
        unread = [name for name in call.unread if name != "chat_template_kwargs.enable_thinking"]
        if body.output_config is not None and body.output_config.effort is not None:
            unread.append("output_config.effort")
        headers = fields.judge(body, strict=services.strict_fields, unread=unread)
        free = admit(call.model.client, 1, "messages")
        if body.stream:
            return EventStream(
                _events(call), headers, free, keepalive=services.sse_keepalive, error=error_event, done=b""
            )
        return await answer(request, _message(call), headers, free)

    @routes.post("/v1/messages/count_tokens", responses=_ERRORS)
    async def count_tokens(body: Conversation, response: Response) -> TokenCount:
        """How long the prompt of a conversation is."""
        chat = as_chat(body)
        model = services.model(chat.model)
        conversation = conversation_of(chat, trusted=services.trust_request_chat_template)
        unread = [name for name in unread_fields(chat, conversation, model.renderer) if "enable_thinking" not in name]
        response.headers.update(fields.judge(body, strict=services.strict_fields, unread=unread))
        prompt = await model.renderer.chat(conversation)
        return TokenCount(input_tokens=len(prompt.token_ids))

    return routes


async def _message(call: ChatCall) -> AnsweredMessage:
    tally, parser = call.tally(), call.reading.parser()
    (one,) = await collect(call.model.client, call.requests)
    tally.add(0, one.whole)
    parsed = parser.push(one.text, last=True)
    stop_reason, stop_sequence = stop_of(_finish(call, parser.finish_reason(one.whole.finish_reason), parser.called),
                                         one.whole.stop_reason)  # fmt: skip
    return AnsweredMessage(
        id=call.head.id,
        model=call.head.model,
        content=blocks_of(parsed, thinking=call.body.include_reasoning),
        stop_reason=stop_reason,
        stop_sequence=stop_sequence,
        usage=usage_of(tally),
    )


async def _events(call: ChatCall) -> AsyncGenerator[bytes, None]:
    tally, parser = call.tally(), call.reading.parser()
    prompt = MessagesUsage(input_tokens=len(call.prompt.token_ids), output_tokens=0)
    message = AnsweredMessage(id=call.head.id, model=call.head.model, content=[], stop_reason=None, usage=prompt)
    writer = BlockWriter(message, thinking=call.body.include_reasoning)
    yield writer.begin()
    async with aclosing(run(call.model.client, call.requests)) as deltas:
        async for _, delta in deltas:
            tally.add(0, delta)
            for event in writer.write(parser.push(delta.text, last=delta.finish_reason is not None)):
                yield event
            if delta.finish_reason is not None:
                finish = _finish(call, parser.finish_reason(delta.finish_reason), parser.called)
                for event in writer.end(*stop_of(finish, delta.stop_reason), usage_of(tally)):
                    yield event


def _finish(call: ChatCall, reason: str | None, called: bool) -> str | None:
    """Here a call of a named tool ends with tool_use as well."""
    return "tool_calls" if reason == "stop" and called else reason
