"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.api import fields
from quire.api.answer import Reading, ReasoningCounter
from quire.api.body import StrictRoute
from quire.api.chunks import ChatChunkWriter, ChunkHead
from quire.api.conversation import conversation_of, unread_fields
from quire.api.errors import InvalidRequest
from quire.api.generation import Collected, Tally, admit, collect, run
from quire.api.identity import answer_id, fingerprint
from quire.api.logprobs import LogprobFormatter
from quire.api.protocol.chat import (
    AnswerMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    ToolCall,
)
from quire.api.protocol.common import ERRORS
from quire.api.sampling import room_for_output, sampling_params, sequences, truncated
from quire.api.served import ServedModel, Services
from quire.api.sse import EventStream, answer, event
from quire.api.structured.constraint import checked_grammar
from quire.api.tools.calls import CallDelta, joined
from quire.api.tools.choice import ToolPlan, tool_plan
from quire.engine.wire.stream import GenerateRequest
from quire.multimodal import renderer
from quire.multimodal.renderer import Prompt


def router(services: Services) -> APIRouter:
    """The endpoint."""
    routes = APIRouter(route_class=StrictRoute)

    @routes.post("/v1/chat/completions", responses={200: {"model": ChatCompletion}, **ERRORS}, response_model=None)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        model = services.model(body.model)
        plan = tool_plan(body, model.tools)
        conversation = conversation_of(body, trusted=services.trust_request_chat_template)
        if body.reasoning_effort is not None and not model.renderer.reads(conversation, "reasoning_effort"):
            raise InvalidRequest("`reasoning_effort` has no effect on this model.", "reasoning_effort")
        unread = unread_fields(body, conversation, model.renderer)
        headers = fields.judge(body, strict=services.strict_fields, unread=unread)
        call_id = answer_id("chatcmpl", request, body.request_id)
        call = await _prepare(body, conversation, model, services, call_id, plan)
        free = admit(model.client, len(call.requests), "n")
        if body.stream:
            return EventStream(_chunks(call), headers, free)
        return await answer(request, _complete(call), headers, free)

    return routes


@dataclass(frozen=True, slots=True)
class _Call:
    """A checked request: `n` sequences behind one prompt."""

    head: ChunkHead
    body: ChatRequest
    model: ServedModel
    prompt: Prompt
    reading: Reading
    final_text: str
    requests: Sequence[GenerateRequest]

    @property
    def formatter(self) -> LogprobFormatter:
        return LogprobFormatter(self.model.renderer.tokenizer, as_ids=bool(self.body.return_tokens_as_token_ids))

    @property
    def role(self) -> str:
        """Who speaks: the assistant, unless a last message of somebody else's is continued."""
        return self.body.messages[-1].role if self.body.continue_final_message else "assistant"

    @property
    def echo(self) -> str:
        echoed = self.body.echo and self.body.messages[-1].role == self.role
        return self.final_text if echoed else ""

    def counter(self) -> ReasoningCounter:
        return ReasoningCounter(self.reading.splitter(), self.model.renderer.tokenizer.token_text)

    def tally(self) -> Tally:
        return Tally([len(self.prompt.token_ids)], len(self.requests))


async def _prepare(
    body: ChatRequest,
    conversation: renderer.ChatRequest,
    model: ServedModel,
    services: Services,
    call_id: str,
    plan: ToolPlan | None,
) -> _Call:
    room = None if body.truncate_prompt_tokens is not None else model.info.max_model_len
    rendered = await model.renderer.chat(conversation, room=room)
    prompt = truncated(rendered, body, model)
    max_tokens = room_for_output(prompt, model, body.max_completion_tokens or body.max_tokens)
    final_text = model.renderer.final_text(conversation) if body.echo or body.continue_final_message else ""
    continued = final_text if body.continue_final_message else ""
    reading = Reading(tags=model.reasoning, prompt=rendered.text, continued=continued, plan=plan)
    params = sampling_params(
        body,
        model,
        services.limits,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=await checked_grammar(body, model, reading.thought, plan),
    )
    requests = sequences(body, prompt, params, services.limits, model.shown_tokens)
    return _Call(
        head=ChunkHead(call_id, int(time.time()), model.names[0]),
        body=body,
        model=model,
        prompt=prompt,
        reading=reading,
        final_text=final_text,
        requests=requests,
    )


async def _complete(call: _Call) -> ChatCompletion:
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
        prompt_logprobs=None if reported is None else call.formatter.prompt(reported),
        prompt_token_ids=call.prompt.token_ids.tolist() if call.body.return_token_ids else None,
    )


def _choice(call: _Call, index: int, one: Collected, tally: Tally) -> ChatChoice:
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


def _tool_call(call: CallDelta) -> ToolCall:
    return ToolCall(id=call.id or "", function=CalledFunction(name=call.name or "", arguments=call.arguments))


async def _chunks(call: _Call) -> AsyncGenerator[bytes, None]:
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
    if usage:
        yield event({**call.head.fields(), "choices": [], "usage": tally.usage().model_dump()})


def _writer(call: _Call, index: int) -> ChatChunkWriter:
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
