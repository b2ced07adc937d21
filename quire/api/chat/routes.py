"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.api.chat.chunks import ChatChunkWriter
from quire.api.chat.prepare import PreparedChat, prepare_chat
from quire.api.http.admission import admit
from quire.api.http.request_head import answer_id, fingerprint
from quire.api.http.routing import CheckedRoute, releaser
from quire.api.http.sse import EventStream, event, respond_unless_disconnected, unless_disconnected
from quire.engine.client.stream import Delta
from quire.parsing.logprobs import encode_entries
from quire.parsing.tools.calls import CallDelta, join_calls
from quire.protocol import fields
from quire.protocol.chat import (
    AnswerMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    ToolCall,
)
from quire.protocol.common import openapi_stream
from quire.protocol.custom import CalledCustom, CustomToolCall
from quire.serving.beams.collect import collect_answers
from quire.serving.generation import SequenceResult, generate_all
from quire.serving.kv_transfer import answer_params
from quire.serving.models import ServerState
from quire.serving.params import sequences_per_prompt
from quire.workers.tenant import take_turn


def router(state: ServerState) -> APIRouter:
    """A router with the endpoints of chat completions."""
    routes = APIRouter(route_class=CheckedRoute)

    @routes.post("/v1/chat/completions", responses=openapi_stream(ChatCompletion), response_model=None)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await answer_chat(body, request, state)

    return routes


async def answer_chat(body: ChatRequest, request: Request, state: ServerState) -> Response:
    """The answer to a conversation, or a stream of it.

    Raises:
        InvalidRequest: a field is not valid.
        EngineError: it cannot be answered.
        PromptError: the conversation cannot be rendered.
    """
    model = state.generating_model(body.model)
    admit(request, model, sequences_per_prompt(body, state.limits), "n")
    response_id = answer_id("chatcmpl", request, body.request_id)
    prepared = await unless_disconnected(request, prepare_chat(body, model, state, response_id))
    fields.ignore(request, prepared.unused_fields)
    if body.stream:
        return EventStream(_chunks(prepared, releaser(request)), keepalive=state.sse_keep_alive_interval)
    return await respond_unless_disconnected(request, _complete(prepared))


async def _complete(prepared: PreparedChat) -> ChatCompletion:
    usage = prepared.usage_counter()
    counters = [prepared.reasoning_counter() for _ in prepared.requests]

    def count_reasoning(index: int, delta: Delta) -> None:
        usage.reasoning += counters[index].count(delta.token_ids)

    results = await collect_answers(
        prepared.model.client,
        prepared.requests,
        prepared.beams,
        prepared.model.renderer.tokenizer,
        count_reasoning,
    )
    choices = []
    for index, result in enumerate(results):
        await take_turn()  # there may be many choices, and many chats that end in the same step
        usage.add(index, result.total)
        choices.append(await _choice(prepared, index, result))
    prompt_logprobs = results[0].total.prompt_logprobs
    formatter = prepared.formatter
    return ChatCompletion(
        id=prepared.head.id,
        created=prepared.head.created,
        model=prepared.head.model,
        choices=choices,
        system_fingerprint=fingerprint(),
        usage=usage.usage(),
        metrics=usage.metrics() if prepared.body.return_metrics else None,
        prompt_logprobs=None if prompt_logprobs is None else await encode_entries(prompt_logprobs, formatter.prompt),
        prompt_token_ids=prepared.prompt.token_ids.tolist() if prepared.body.return_token_ids else None,
        kv_transfer_params=answer_params(results[0].total.held_blocks),
    )


async def _choice(prepared: PreparedChat, index: int, result: SequenceResult) -> ChatChoice:
    body = prepared.body
    total = result.total
    parser = prepared.parser("chat_completions", streams=False)
    parsed = parser.push(result.text, last=True)
    reasoning = parsed.reasoning if parsed.reasoning and body.include_reasoning else None
    calls = [_tool_call(call) for call in join_calls(parsed.calls)]
    content = prepared.echo + parsed.content
    logprobs = await encode_entries(total.logprobs, prepared.formatter.chat) if body.logprobs else None
    return ChatChoice(
        index=index,
        message=AnswerMessage(
            role=prepared.role,
            content=content if content or not (calls or parsed.reasoning) else None,
            reasoning=reasoning,
            reasoning_content=reasoning,
            tool_calls=calls or None,
        ),
        logprobs=None if logprobs is None else ChatLogprobs(content=logprobs),
        finish_reason=parser.finish_reason(total.finish_reason),
        stop_reason=total.stop_reason,
        token_ids=total.token_ids if body.return_token_ids else None,
    )


def _tool_call(call: CallDelta) -> ToolCall | CustomToolCall:
    call_id, name = call.id or "", call.name or ""
    if call.custom:
        return CustomToolCall(id=call_id, custom=CalledCustom(name=name, input=call.arguments))
    return ToolCall(id=call_id, function=CalledFunction(name=name, arguments=call.arguments))


async def _chunks(prepared: PreparedChat, ended: Callable[[], None]) -> AsyncGenerator[bytes, None]:
    """The stream: for each choice its role, its deltas and its end; then the usage if the request asks for it."""
    body = prepared.body
    counter = prepared.usage_counter()
    usage, continuous = body.streams_usage, body.streams_usage_continuously
    prompt_token_ids = prepared.prompt.token_ids.tolist() if body.return_token_ids else None
    writers = [_writer(prepared, index, prompt_token_ids) for index in range(len(prepared.requests))]
    reasoning = [prepared.reasoning_counter() for _ in prepared.requests] if usage and prepared.model.reasoning else []
    async with aclosing(generate_all(prepared.model.client, prepared.requests, ended)) as deltas:
        async for index, delta in deltas:
            counter.add(index, delta)
            thought = reasoning[index].count(delta.token_ids) if reasoning else 0
            counter.reasoning += thought
            if not writers[index].started:  # the role's chunk has none of the tokens
                before = counter.usage_before(len(delta.token_ids), thought).model_dump() if continuous else None
                for chunk in writers[index].start(before):
                    yield chunk
            counted: Mapping[str, Any] | None = counter.usage().model_dump() if continuous else None
            for chunk in writers[index].write(delta, counted):
                yield chunk
    if usage or body.return_metrics:
        final = counter.final_fields(usage=usage, metrics=bool(body.return_metrics))
        yield event({**prepared.head.fields(), "choices": [], **final})


def _writer(prepared: PreparedChat, index: int, prompt_token_ids: Sequence[int] | None) -> ChatChunkWriter:
    body = prepared.body
    return ChatChunkWriter(
        prepared.head,
        index,
        role=prepared.role,
        echo=prepared.echo,
        parser=prepared.parser("chat_completions", streams=True),
        include_reasoning=body.include_reasoning,
        formatter=prepared.formatter if body.logprobs else None,
        prompt_token_ids=prompt_token_ids,
        has_usage=body.streams_usage,
    )
