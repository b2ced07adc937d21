"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.api.answers.tools.calls import CallDelta, joined
from quire.api.chat.chunks import ChatChunkWriter
from quire.api.chat.prepare import ChatCall, prepare_chat
from quire.api.http import fields
from quire.api.http.body import StrictRoute
from quire.api.http.identity import answer_id, fingerprint
from quire.api.http.sse import EventStream, answer, event
from quire.api.protocol.chat import (
    AnswerMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    ToolCall,
)
from quire.api.protocol.common import streamed
from quire.api.protocol.custom import CalledCustom, CustomToolCall
from quire.api.serving.generation import Collected, Tally, admit, collect, run
from quire.api.serving.models import Services


def router(services: Services) -> APIRouter:
    """The endpoint."""
    routes = APIRouter(route_class=StrictRoute)

    @routes.post("/v1/chat/completions", responses=streamed(ChatCompletion), response_model=None)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        call = await prepare_chat(body, services, answer_id("chatcmpl", request, body.request_id))
        headers = fields.judge(body, strict=services.strict_fields, unread=call.unread)
        free = admit(call.model.client, len(call.requests), "n")
        if body.stream:
            return EventStream(_chunks(call), headers, free, keepalive=services.sse_keepalive)
        return await answer(request, _complete(call), headers, free)

    return routes


async def _complete(call: ChatCall) -> ChatCompletion:
    tally = call.tally()
    done = await collect(call.model.client, call.requests)
    choices = []
    for index, one in enumerate(done):
        tally.add(index, one.whole)
        choices.append(_choice(call, index, one, tally))
    reported = done[0].whole.prompt_logprobs
    return ChatCompletion(
        id=call.head.id,
        created=call.head.created,
        model=call.head.model,
        choices=choices,
        system_fingerprint=fingerprint(),
        usage=tally.usage(),
        metrics=tally.metrics() if call.body.return_metrics else None,
        prompt_logprobs=None if reported is None else call.formatter.prompt(reported),
        prompt_token_ids=call.prompt.token_ids.tolist() if call.body.return_token_ids else None,
    )


def _choice(call: ChatCall, index: int, one: Collected, tally: Tally) -> ChatChoice:
    whole, parser = one.whole, call.reading.parser()
    parsed = parser.push(one.text, last=True)
    tally.reasoning += call.counter().count(whole.token_ids)
    shown = parsed.reasoning if parsed.reasoning and call.body.include_reasoning else None
    calls = [_tool_call(each) for each in joined(parsed.calls)]
    content = call.echo + parsed.content
    return ChatChoice(
        index=index,
        message=AnswerMessage(
            role=call.role,
            content=content if content or not calls else None,
            reasoning=shown,
            reasoning_content=shown,
            tool_calls=calls or None,
        ),
        logprobs=ChatLogprobs(content=call.formatter.chat(whole.logprobs)) if call.body.logprobs else None,
        finish_reason=parser.finish_reason(whole.finish_reason),
        stop_reason=whole.stop_reason,
        token_ids=whole.token_ids if call.body.return_token_ids else None,
    )


def _tool_call(call: CallDelta) -> ToolCall | CustomToolCall:
    call_id, name = call.id or "", call.name or ""
    if call.custom:
        return CustomToolCall(id=call_id, custom=CalledCustom(name=name, input=call.arguments))
    return ToolCall(id=call_id, function=CalledFunction(name=name, arguments=call.arguments))


async def _chunks(call: ChatCall) -> AsyncGenerator[bytes, None]:
    """The stream: for each choice its role, its deltas and its end; then the usage if it is wanted."""
    tally = call.tally()
    options = call.body.stream_options
    usage = options is not None and options.include_usage
    continuous = usage and options is not None and options.continuous_usage_stats
    writers = [_writer(call, index) for index in range(len(call.requests))]
    counters = [call.counter() for _ in call.requests] if usage and call.model.reasoning else []
    async with aclosing(run(call.model.client, call.requests)) as deltas:
        async for index, delta in deltas:
            tally.add(index, delta)
            if counters:
                tally.reasoning += counters[index].count(delta.token_ids)
            counted: Mapping[str, Any] | None = tally.usage().model_dump() if continuous else None
            for chunk in writers[index].write(delta, counted):
                yield chunk
    if usage or call.body.return_metrics:
        yield event(
            {
                **call.head.fields(),
                "choices": [],
                **tally.last_words(usage=usage, metrics=bool(call.body.return_metrics)),
            }
        )


def _writer(call: ChatCall, index: int) -> ChatChunkWriter:
    body = call.body
    return ChatChunkWriter(
        call.head,
        index,
        role=call.role,
        echo=call.echo,
        parser=call.reading.parser(),
        include_reasoning=body.include_reasoning,
        formatter=call.formatter if body.logprobs else None,
        prompt_token_ids=call.prompt.token_ids.tolist() if body.return_token_ids else None,
    )
