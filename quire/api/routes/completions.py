"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.api import fields
from quire.api.body import StrictRoute
from quire.api.errors import InvalidRequest
from quire.api.generation import Collected, Tally, admit, collect, run
from quire.api.identity import answer_id, fingerprint
from quire.api.logprobs import LogprobFormatter, TextPosition
from quire.api.protocol.common import ERRORS
from quire.api.protocol.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from quire.api.sampling import room_for_output, sampling_params, sequences, truncated
from quire.api.served import ServedModel, Services
from quire.api.sse import EventStream, answer, event
from quire.api.structured.constraint import checked_grammar
from quire.engine.wire.protocol import SamplingParams, TokenLogprobs
from quire.engine.wire.stream import Delta, GenerateRequest
from quire.multimodal.renderer import Prompt


def router(services: Services) -> APIRouter:
    """The endpoint."""
    routes = APIRouter(route_class=StrictRoute)

    @routes.post("/v1/completions", responses={200: {"model": Completion}, **ERRORS}, response_model=None)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts."""
        model = services.model(body.model)
        headers = fields.judge(body, strict=services.strict_fields)
        call = await _prepare(body, model, services, answer_id("cmpl", request, body.request_id))
        free = admit(model.client, len(call.requests), "prompt" if len(call.prompts) > 1 else "n")
        if body.stream:
            return EventStream(_chunks(call), headers, free, keepalive=services.sse_keepalive)
        return await answer(request, _complete(call), headers, free)

    return routes


@dataclass(frozen=True, slots=True)
class _Call:
    """A checked request: its sequences in order of their choices' indices, `n` for each prompt."""

    id: str
    created: int
    body: CompletionRequest
    model: ServedModel
    prompts: Sequence[Prompt]
    echoes: Sequence[str]
    requests: Sequence[GenerateRequest]

    @property
    def n(self) -> int:
        return self.body.n or 1

    @property
    def formatter(self) -> LogprobFormatter:
        return LogprobFormatter(self.model.renderer.tokenizer, as_ids=bool(self.body.return_tokens_as_token_ids))

    @property
    def drops_output(self) -> bool:
        """Only the prompt is wanted; the one token that is generated behind it is not shown."""
        return self.body.max_tokens == 0

    def prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.n]

    def echo_of(self, index: int) -> str:
        return self.echoes[index // self.n] if self.body.echo else ""

    def tally(self) -> Tally:
        return Tally([len(prompt.token_ids) for prompt in self.prompts], self.n)


async def _prepare(body: CompletionRequest, model: ServedModel, services: Services, call_id: str) -> _Call:
    if body.suffix:
        raise InvalidRequest("`suffix` is not supported: models here continue texts, they do not fill gaps.", "suffix")
    prompts = [truncated(prompt, body, model) for prompt in await _prompts(body, model, services)]
    requests: list[GenerateRequest] = []
    grammar = await checked_grammar(body, model)
    for prompt in prompts:
        requests += sequences(body, prompt, _params(body, model, services, prompt, grammar), services.limits)
    echoes = [
        prompt.text if prompt.text is not None else await model.renderer.decode(prompt.token_ids.tolist())
        for prompt in (prompts if body.echo else ())
    ]
    return _Call(call_id, int(time.time()), body, model, prompts, echoes, requests)


def _params(
    body: CompletionRequest, model: ServedModel, services: Services, prompt: Prompt, grammar: str
) -> SamplingParams:
    max_tokens = room_for_output(prompt, model, 1 if body.max_tokens == 0 else body.max_tokens)
    if body.echo and body.logprobs is not None:
        wanted = body.logprobs if body.prompt_logprobs is None else max(body.logprobs, body.prompt_logprobs)
        body = body.model_copy(update={"prompt_logprobs": wanted})
    return sampling_params(body, model, services.limits, max_tokens=max_tokens, logprobs=body.logprobs, grammar=grammar)


async def _prompts(body: CompletionRequest, model: ServedModel, services: Services) -> list[Prompt]:
    given = body.prompt
    several = given if isinstance(given, list) and not (given and isinstance(given[0], int)) else [given]
    if not several:
        raise InvalidRequest("You must pass at least one prompt.", "prompt")
    if len(several) > services.limits.max_prompts:
        raise InvalidRequest(
            f"A request may have at most {services.limits.max_prompts} prompts, not {len(several)}.", "prompt"
        )
    room = None if body.truncate_prompt_tokens is not None else model.info.max_model_len
    return [
        await model.renderer.text(one, add_special_tokens=body.add_special_tokens, room=room)
        if isinstance(one, str)
        else Prompt(np.array(one, np.int32))
        for one in several
    ]


async def _complete(call: _Call) -> Completion:
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
    )


def _choice(call: _Call, index: int, one: Collected) -> CompletionChoice:
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


async def _chunks(call: _Call) -> AsyncGenerator[bytes, None]:
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
    if usage:
        yield event({**_head(call), "choices": [], "usage": tally.usage().model_dump()})


class _ChunkWriter:
    """Writes the chunks of one choice; plain ones from a template, as most tokens ask for nothing else."""

    def __init__(self, call: _Call, index: int) -> None:
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


def _head(call: _Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "object": "text_completion",
        "created": call.created,
        "model": call.model.names[0],
        "system_fingerprint": fingerprint(),
    }
