"""POST /v1/completions."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.api.completions.prepare import PreparedCompletion, count_sequences, prepare_completion
from quire.api.http.admission import admit
from quire.api.http.request_head import answer_id, fingerprint
from quire.api.http.routing import CheckedRoute, releaser
from quire.api.http.sse import EventStream, event, respond_unless_disconnected, unless_disconnected
from quire.engine.client.protocol import TokenLogprobs
from quire.engine.client.stream import Delta
from quire.parsing.logprobs import CompletionLogprobColumns, TextPosition, encode_entries
from quire.protocol import fields
from quire.protocol.common import openapi_stream
from quire.protocol.completions import Completion, CompletionChoice, CompletionRequest
from quire.serving.beams.collect import collect_answers
from quire.serving.beams.options import unused_with_beams
from quire.serving.generation import SequenceResult, generate_all
from quire.serving.kv_transfer import answer_params
from quire.serving.models import ServerState


def router(state: ServerState) -> APIRouter:
    """A router with the endpoints of completions."""
    routes = APIRouter(route_class=CheckedRoute)

    @routes.post("/v1/completions", responses=openapi_stream(Completion), response_model=None)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts."""
        return await answer_completion(body, request, state)

    return routes


async def answer_completion(body: CompletionRequest, request: Request, state: ServerState) -> Response:
    """The continuations of the prompts, or a stream of them.

    Raises:
        InvalidRequest: a field is not valid.
        EngineError: it cannot be answered.
        PromptError: a prompt cannot be tokenized.
    """
    model = state.generating_model(body.model)
    admit(request, model, count_sequences(body, state.limits), "prompt" if _has_several_prompts(body) else "n")
    response_id = answer_id("cmpl", request, body.request_id)
    fields.ignore(request, unused_with_beams(body))
    prepared = await unless_disconnected(request, prepare_completion(body, model, state, response_id))
    if body.stream:
        return EventStream(_chunks(prepared, releaser(request)), keepalive=state.sse_keep_alive_interval)
    return await respond_unless_disconnected(request, _complete(prepared))


def _has_several_prompts(body: CompletionRequest) -> bool:
    return isinstance(body.prompt, list) and len(body.prompt) > 1


async def _complete(prepared: PreparedCompletion) -> Completion:
    usage = prepared.usage_counter()
    results = await collect_answers(
        prepared.model.client, prepared.requests, prepared.beams, prepared.model.renderer.tokenizer
    )
    for index, result in enumerate(results):
        if prepared.drops_output:
            result.drop_output()
            result.total.finish_reason = "length"
            result.total.stop_reason = None
        usage.add(index, result.total)
    return Completion(
        id=prepared.id,
        created=prepared.created,
        model=prepared.model.names[0],
        choices=await _choices(prepared, results),
        system_fingerprint=fingerprint(),
        usage=usage.usage(),
        metrics=usage.metrics() if prepared.body.return_metrics else None,
        kv_transfer_params=answer_params(results[0].total.held_blocks),
    )


async def _choices(prepared: PreparedCompletion, results: Sequence[SequenceResult]) -> list[CompletionChoice]:
    """The choices of all prompts. What they have of the prompt is made once for each of them."""
    choices: list[CompletionChoice] = []
    for number, prompt in enumerate(prepared.prompts):
        of_prompt = results[number * prepared.n : (number + 1) * prepared.n]
        shared = await _prompt_part(prepared, prompt.token_ids.tolist(), of_prompt[0].total.prompt_logprobs or ())
        for result in of_prompt:
            choices.append(await _choice(prepared, len(choices), result, shared))
    return choices


@dataclass(frozen=True, slots=True)
class _PromptPart:
    """Values common to all choices of a prompt.

    Attributes:
        token_ids: token ids of the prompt, if the request asks for them.
        logprobs: `prompt_logprobs`, if the request asks for them.
        columns: columns of `logprobs`, with the prompt if it is echoed.
    """

    token_ids: orjson.Fragment | None
    logprobs: orjson.Fragment | None
    columns: CompletionLogprobColumns


async def _prompt_part(
    prepared: PreparedCompletion, tokens: list[int], entries: Sequence[TokenLogprobs | None]
) -> _PromptPart:
    body, formatter = prepared.body, prepared.formatter
    columns = CompletionLogprobColumns(formatter, TextPosition())
    if body.logprobs is not None and body.echo:
        await columns.extend(entries, tokens)
    return _PromptPart(
        token_ids=orjson.Fragment(orjson.dumps(tokens)) if body.return_token_ids else None,
        logprobs=None if body.prompt_logprobs is None else await encode_entries(entries, formatter.prompt),
        columns=columns,
    )


async def _choice(
    prepared: PreparedCompletion, index: int, result: SequenceResult, prompt: _PromptPart
) -> CompletionChoice:
    body, total = prepared.body, result.total
    logprobs = None
    if body.logprobs is not None:
        columns = copy.copy(prompt.columns)
        await columns.extend(total.logprobs, total.token_ids)
        logprobs = columns.json()
    return CompletionChoice(
        index=index,
        text=prepared.echo_of(index) + result.text,
        logprobs=logprobs,
        finish_reason=total.finish_reason,
        stop_reason=total.stop_reason,
        token_ids=total.token_ids if body.return_token_ids else None,
        prompt_token_ids=prompt.token_ids,
        prompt_logprobs=prompt.logprobs,
    )


async def _chunks(prepared: PreparedCompletion, ended: Callable[[], None]) -> AsyncGenerator[bytes, None]:
    """The stream: a chunk for each delta, then the usage if the request asks for it."""
    body = prepared.body
    counter = prepared.usage_counter()
    usage, continuous = body.streams_usage, body.streams_usage_continuously
    writers = [_ChunkWriter(prepared, index) for index in range(len(prepared.requests))]
    async with aclosing(generate_all(prepared.model.client, prepared.requests, ended)) as deltas:
        async for index, delta in deltas:
            if prepared.drops_output:
                delta.text = ""
                delta.token_ids = []
                delta.logprobs = []
                delta.finish_reason = "length"
            counter.add(index, delta)
            yield await writers[index].write(delta, counter.usage().model_dump() if continuous else None)
    if usage or body.return_metrics:
        final = counter.final_fields(usage=usage, metrics=bool(body.return_metrics))
        yield event({**_head(prepared), "choices": [], **final})


class _ChunkWriter:
    """Write the chunks of one choice. Most contain only text and are made from a prepared template."""

    def __init__(self, prepared: PreparedCompletion, index: int) -> None:
        self._prepared = prepared
        self._index = index
        self._first = True
        self._position = TextPosition()
        body = prepared.body
        self._plain = body.logprobs is None and not body.return_token_ids
        placeholder = "\ue000"
        template = event({**_head(prepared), "choices": [self._fields(placeholder, None, None, None)], "usage": None})
        self._before, self._after = template.split(f'"{placeholder}"'.encode())

    async def write(self, delta: Delta, usage: dict[str, Any] | None) -> bytes:
        """One chunk."""
        text = delta.text
        if self._first:
            text = self._prepared.echo_of(self._index) + text
        if self._plain and usage is None and delta.finish_reason is None:
            self._first = False
            return self._before + orjson.dumps(text) + self._after
        logprobs = await self._logprobs(delta)
        choice = self._fields(text, logprobs, delta.finish_reason, delta.stop_reason)
        if self._prepared.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if self._first:
                choice["prompt_token_ids"] = self._prepared.prompt_of(self._index).token_ids.tolist()
        self._first = False
        return event({**_head(self._prepared), "choices": [choice], "usage": usage})

    async def _logprobs(self, delta: Delta) -> orjson.Fragment | None:
        body = self._prepared.body
        if body.logprobs is None:
            return None
        columns = CompletionLogprobColumns(self._prepared.formatter, self._position)
        if body.echo and self._first:
            await columns.extend(delta.prompt_logprobs or (), self._prepared.prompt_of(self._index).token_ids.tolist())
        await columns.extend(delta.logprobs, delta.token_ids)
        return columns.json()

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


def _head(prepared: PreparedCompletion) -> dict[str, Any]:
    return {
        "id": prepared.id,
        "object": "text_completion",
        "created": prepared.created,
        "model": prepared.model.names[0],
        "system_fingerprint": fingerprint(),
    }
