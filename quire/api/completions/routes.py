"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.api.answers.logprobs import TextPosition
from quire.api.completions.prepare import CompletionCall, prepare_completion
from quire.api.http import fields
from quire.api.http.body import StrictRoute
from quire.api.http.identity import answer_id, fingerprint
from quire.api.http.sse import EventStream, answer, event
from quire.api.protocol.common import streamed
from quire.api.protocol.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from quire.api.serving.generation import Collected, admit, collect, run
from quire.api.serving.models import Services
from quire.engine.wire.protocol import TokenLogprobs
from quire.engine.wire.stream import Delta


def router(services: Services) -> APIRouter:
    """The endpoint."""
    routes = APIRouter(route_class=StrictRoute)

    @routes.post("/v1/completions", responses=streamed(Completion), response_model=None)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts."""
        model = services.model(body.model)
        headers = fields.judge(body, strict=services.strict_fields)
        call = await prepare_completion(body, model, services, answer_id("cmpl", request, body.request_id))
        free = admit(model.client, len(call.requests), "prompt" if len(call.prompts) > 1 else "n")
        if body.stream:
            return EventStream(_chunks(call), headers, free, keepalive=services.sse_keepalive)
        return await answer(request, _complete(call), headers, free)

    return routes


async def _complete(call: CompletionCall) -> Completion:
    tally = call.tally()
    done = await collect(call.model.client, call.requests)
    for index, one in enumerate(done):
        if call.drops_output:
            one.text, one.whole.token_ids, one.whole.logprobs = "", [], []
            one.whole.finish_reason, one.whole.stop_reason = "length", None
        tally.add(index, one.whole)
    return Completion(
        id=call.id,
        created=call.created,
        model=call.model.names[0],
        choices=[_choice(call, index, one) for index, one in enumerate(done)],
        system_fingerprint=fingerprint(),
        usage=tally.usage(),
        metrics=tally.metrics() if call.body.return_metrics else None,
    )


def _choice(call: CompletionCall, index: int, one: Collected) -> CompletionChoice:
    body, formatter, whole = call.body, call.formatter, one.whole
    prompt = call.prompt_of(index).token_ids.tolist()
    logprobs = None
    if body.logprobs is not None:
        entries: list[TokenLogprobs | None] = [*whole.logprobs]
        tokens = whole.token_ids
        if body.echo:
            entries, tokens = [*(whole.prompt_logprobs or ()), *entries], [*prompt, *tokens]
        logprobs = CompletionLogprobs(**formatter.completion(entries, tokens, TextPosition()))
    reported = whole.prompt_logprobs if body.prompt_logprobs is not None else None
    return CompletionChoice(
        index=index,
        text=call.echo_of(index) + one.text,
        logprobs=logprobs,
        finish_reason=whole.finish_reason,
        stop_reason=whole.stop_reason,
        token_ids=whole.token_ids if body.return_token_ids else None,
        prompt_token_ids=prompt if body.return_token_ids else None,
        prompt_logprobs=None if reported is None else formatter.prompt(reported),
    )


async def _chunks(call: CompletionCall) -> AsyncGenerator[bytes, None]:
    """The stream: a chunk for each delta, then the usage if it is wanted."""
    tally = call.tally()
    options = call.body.stream_options
    usage = options is not None and options.include_usage
    continuous = usage and options is not None and options.continuous_usage_stats
    writers = [_ChunkWriter(call, index) for index in range(len(call.requests))]
    async with aclosing(run(call.model.client, call.requests)) as deltas:
        async for index, delta in deltas:
            if call.drops_output:
                delta.text, delta.token_ids, delta.logprobs, delta.finish_reason = "", [], [], "length"
            tally.add(index, delta)
            yield writers[index].write(delta, tally.usage().model_dump() if continuous else None)
    if usage or call.body.return_metrics:
        yield event(
            {**_head(call), "choices": [], **tally.last_words(usage=usage, metrics=bool(call.body.return_metrics))}
        )


class _ChunkWriter:
    """Writes the chunks of one choice; plain ones from a template, as most tokens ask for nothing else."""

    def __init__(self, call: CompletionCall, index: int) -> None:
        self._call = call
        self._index = index
        self._first = True
        self._position = TextPosition()
        body = call.body
        self._plain = body.logprobs is None and not body.return_token_ids
        mark = "\ue000"
        template = event({**_head(call), "choices": [self._fields(mark, None, None, None)], "usage": None})
        self._before, self._after = template.split(f'"{mark}"'.encode())

    def write(self, delta: Delta, usage: dict[str, Any] | None) -> bytes:
        """One chunk."""
        text = delta.text
        if self._first:
            text = self._call.echo_of(self._index) + text
        if self._plain and usage is None and delta.finish_reason is None:
            self._first = False
            return self._before + orjson.dumps(text) + self._after
        logprobs = self._logprobs(delta)
        choice = self._fields(text, logprobs, delta.finish_reason, delta.stop_reason)
        if self._call.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if self._first:
                choice["prompt_token_ids"] = self._call.prompt_of(self._index).token_ids.tolist()
        self._first = False
        return event({**_head(self._call), "choices": [choice], "usage": usage})

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        body = self._call.body
        if body.logprobs is None:
            return None
        entries: list[TokenLogprobs | None] = [*delta.logprobs]
        tokens = delta.token_ids
        if body.echo and self._first:
            entries = [*(delta.prompt_logprobs or ()), *entries]
            tokens = [*self._call.prompt_of(self._index).token_ids.tolist(), *tokens]
        return self._call.formatter.completion(entries, tokens, self._position)

    def _fields(self, text: str, logprobs: Any, finish_reason: Any, stop_reason: Any) -> dict[str, Any]:
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "prompt_token_ids": None,
            "token_ids": None,
        }


def _head(call: CompletionCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "object": "text_completion",
        "created": call.created,
        "model": call.model.names[0],
        "system_fingerprint": fingerprint(),
    }
