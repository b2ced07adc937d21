"""POST /inference/v1/generate, and the render endpoints that make its input."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.api.chat.prepare import prepare_chat
from quire.api.chat.rendered import rendered, rendered_chat, with_offsets
from quire.api.completions.prepare import MAX_PROMPT_LOGPROBS, PreparedCompletion, count_sequences, prepare_completion
from quire.api.http.admission import admit, check_capacity
from quire.api.http.body import request_of
from quire.api.http.request_head import answer_id
from quire.api.http.routing import CheckedRoute, releaser
from quire.api.http.sse import EventStream, event, respond_unless_disconnected, unless_disconnected
from quire.config.options import LimitOptions
from quire.engine.client.protocol import TokenLogprobs
from quire.engine.client.sampling_params import PromptTokenIds, SamplingNumbers
from quire.engine.client.stream import Delta
from quire.parsing.logprobs import encode_entries
from quire.protocol import fields
from quire.protocol.chat import ChatLogprobs
from quire.protocol.common import ERRORS, openapi_stream
from quire.protocol.completions import CompletionRequest
from quire.protocol.errors import InvalidRequest
from quire.protocol.generate import (
    ChatRendering,
    CompletionRendering,
    RenderedPrompt,
    TokenLogprobsList,
    TokensChoice,
    TokensRequest,
    TokensResponse,
)
from quire.protocol.sampling import StreamOptions
from quire.serving.generation import collect, generate_all
from quire.serving.kv_transfer import answer_params
from quire.serving.models import GeneratingModel, ServerState

_OUTER_FIELDS = (
    "model", "stream", "stream_options", "cache_salt", "priority", "request_id", "return_token_ids", "return_metrics",
    "return_tokens_as_token_ids",
)  # fmt: skip
_PROMPT_FIELDS = ("prompt_logprob_token_ids", "prompt_logprob_start")


def router(state: ServerState) -> APIRouter:
    """A router with the endpoints of tokens in, tokens out."""
    routes = APIRouter(route_class=CheckedRoute)

    @routes.post("/inference/v1/generate", responses=openapi_stream(TokensResponse), response_model=None)
    async def generate(body: TokensRequest, request: Request) -> Response:
        """Continue a prompt of tokens."""
        parameters = body.sampling_params
        fields.ignore(request, [*fields.take_unknown_fields(parameters), *_misplaced_fields(body)])
        model = state.generating_model(body.model)
        completion = _as_completion(body)
        admit(request, model, count_sequences(completion, state.limits), "sampling_params.n")
        response_id = answer_id("generate-tokens", request, body.request_id)
        listed = await asyncio.to_thread(_prompt_token_ids, body, model, state.limits)  # there may be millions
        prepared = await unless_disconnected(request, prepare_completion(completion, model, state, response_id, listed))
        if body.stream:
            return EventStream(_chunks(prepared, body, releaser(request)), keepalive=state.sse_keep_alive_interval)
        return await respond_unless_disconnected(request, _complete(prepared, body))

    return routes


def render_router(state: ServerState) -> APIRouter:
    """A router with the render endpoints alone."""
    routes = APIRouter(route_class=CheckedRoute)

    @routes.post("/v1/chat/completions/render", responses=ERRORS)
    async def render_chat(body: ChatRendering, request: Request) -> RenderedPrompt:
        """Render and tokenize a conversation without generating anything."""
        model = state.generating_model(body.model)
        response_id = answer_id("chatcmpl", request, body.request_id)
        prepared = await unless_disconnected(request, prepare_chat(body, model, state, response_id))
        fields.ignore(request, prepared.unused_fields)
        prompt = rendered_chat(prepared)
        return await with_offsets(prompt, model.renderer.tokenizer) if body.return_token_offsets else prompt

    @routes.post("/v1/completions/render", responses=ERRORS)
    async def render_completion(body: CompletionRendering, request: Request) -> list[RenderedPrompt]:
        """Tokenize prompts without generating anything."""
        model = state.generating_model(body.model)
        check_capacity(model, count_sequences(body, state.limits), "prompt" if isinstance(body.prompt, list) else "n")
        response_id = answer_id("cmpl", request, body.request_id)
        prepared = await unless_disconnected(request, prepare_completion(body, model, state, response_id))
        prompts = [
            rendered(f"{prepared.id}-{index}", model.names[0], body, prompt, prepared.requests[index * prepared.n])
            for index, prompt in enumerate(prepared.prompts)
        ]
        if body.return_token_offsets:
            return [await with_offsets(prompt, model.renderer.tokenizer) for prompt in prompts]
        return prompts

    return routes


def _misplaced_fields(body: TokensRequest) -> list[str]:
    """Names of fields in `sampling_params` that have an effect only outside of it."""
    return [f"sampling_params.{name}" for name in _OUTER_FIELDS if name in body.sampling_params.model_fields_set]


def _as_completion(body: TokensRequest) -> CompletionRequest:
    parameters = body.sampling_params
    names = type(parameters).model_fields.keys() - {"detokenize", *_PROMPT_FIELDS, *_OUTER_FIELDS}
    parameter_fields = msgspec.structs.asdict(SamplingNumbers())  # in place of the model's defaults
    parameter_fields |= {name: value for name in names if (value := getattr(parameters, name)) is not None}
    if parameters.logprob_token_ids is not None:
        parameter_fields.setdefault("logprobs", 0)
    if not parameters.detokenize and parameters.stop:
        raise InvalidRequest("`stop` requires `detokenize: true`.", "sampling_params.stop")
    body_fields = {
        "model": body.model, "prompt": body.token_ids, "stream": body.stream, "cache_salt": body.cache_salt,
        "kv_transfer_params": body.kv_transfer_params,
        "priority": body.priority, "max_tokens": parameters.max_tokens, "return_token_ids": body.return_token_ids,
    }  # fmt: skip
    return request_of(CompletionRequest, parameter_fields | body_fields)


def _prompt_token_ids(body: TokensRequest, model: GeneratingModel, limits: LimitOptions) -> PromptTokenIds | None:
    """The tokens to score at positions of the prompt.

    Raises:
        InvalidRequest: the fields do not fit to each other or to the prompt.
    """
    name = "prompt_logprob_token_ids"
    parameters = body.sampling_params
    rows = parameters.prompt_logprob_token_ids
    start = parameters.prompt_logprob_start or 0
    if rows is None:
        if parameters.prompt_logprob_start is not None:
            raise InvalidRequest(f"`prompt_logprob_start` needs `{name}`.", "prompt_logprob_start")
        return None
    width = max(map(len, rows))
    expected = max(0, len(body.token_ids) - 1 - start)
    if body.stream:
        raise InvalidRequest(f"`{name}` is not available when `stream=True`.", name)
    if parameters.prompt_logprobs is not None:
        raise InvalidRequest(f"`{name}` cannot be combined with `prompt_logprobs`.", name)
    if len(rows) != expected:
        raise InvalidRequest(
            f"`{name}` has {len(rows)} rows; it needs one for each of the {expected} tokens of the prompt after token "
            f"{start} (`prompt_logprob_start`).",
            name,
        )
    if width < 1:
        raise InvalidRequest(f"`{name}` has no token ids.", name)
    if 0 <= limits.max_logprobs < width:
        raise InvalidRequest(
            f"The rows of `{name}` may have at most {limits.max_logprobs} token ids (--max-logprobs), not {width}.",
            name,
        )
    if width * len(rows) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(f"`{name}` may have at most {MAX_PROMPT_LOGPROBS} token ids.", name)
    ids = np.full((len(rows), width), -1, np.int32)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    if int(ids.max()) >= model.info.vocab_size:
        raise InvalidRequest(
            f"`{name}` has a token id outside of the vocabulary of {model.info.vocab_size} tokens.", name
        )
    return PromptTokenIds(start, width, ids.reshape(-1))


def _scores(listed: PromptTokenIds, entries: Sequence[TokenLogprobs | None]) -> str:
    """The log-probabilities of listed tokens, as vLLM encodes them."""
    token_ids = listed.token_ids.reshape(-1, listed.width)
    scores = np.full(token_ids.shape, -np.inf, np.float32)
    for index, entry in enumerate(entries[listed.start + 1 :]):
        if entry is not None:
            scores[index][token_ids[index] >= 0] = entry.logprobs[1:]
    with io.BytesIO() as file:
        np.save(file, scores, allow_pickle=False)
        return base64.b64encode(file.getvalue()).decode()


async def _complete(prepared: PreparedCompletion, body: TokensRequest) -> TokensResponse:
    usage = prepared.usage_counter()
    results = await collect(prepared.model.client, prepared.requests)
    for index, result in enumerate(results):
        usage.add(index, result.total)
    prompt_logprobs = results[0].total.prompt_logprobs
    formatter = prepared.formatter
    scores = None
    listed = prepared.requests[0].params.prompt_token_ids
    if listed is not None and prompt_logprobs is not None:
        scores = await asyncio.to_thread(_scores, listed, prompt_logprobs)
        prompt_logprobs = None
    return TokensResponse(
        request_id=prepared.id,
        model=prepared.model.names[0],
        created=prepared.created,
        output_mode=body.output_mode,
        choices=[
            await _choice(prepared, body, index, result.text, result.total) for index, result in enumerate(results)
        ],
        prompt_logprobs=None if prompt_logprobs is None else await encode_entries(prompt_logprobs, formatter.prompt),
        prompt_token_id_logprobs=scores,
        prompt_token_ids=prepared.prompt_of(0).token_ids.tolist() if body.return_token_ids else None,
        usage=usage.usage(),
        kv_transfer_params=answer_params(results[0].total.held_blocks),
    )


async def _chunks(
    prepared: PreparedCompletion, body: TokensRequest, ended: Callable[[], None]
) -> AsyncGenerator[bytes, None]:
    usage = prepared.usage_counter()
    head = {"request_id": prepared.id, "output_mode": body.output_mode}
    first = {"prompt_token_ids": prepared.prompt_of(0).token_ids.tolist()} if body.return_token_ids else {}
    options = body.stream_options or StreamOptions()
    async with aclosing(generate_all(prepared.model.client, prepared.requests, ended)) as deltas:
        async for index, delta in deltas:
            usage.add(index, delta)
            choice = await _choice(prepared, body, index, delta.text, delta)
            counted = (
                {"usage": usage.usage().model_dump()}
                if options.include_usage and options.continuous_usage_stats
                else {}
            )
            yield event({**head, **first, "choices": [choice.model_dump()], **counted})
            first = {}
    if options.include_usage:
        yield event({**head, "choices": [], "usage": usage.usage().model_dump()})


async def _choice(
    prepared: PreparedCompletion, body: TokensRequest, index: int, text: str, delta: Delta
) -> TokensChoice:
    logprobs: TokenLogprobsList | ChatLogprobs | None = None
    if prepared.body.logprobs is not None and body.output_mode == "text":
        logprobs = ChatLogprobs(content=await encode_entries(delta.logprobs, prepared.formatter.chat_with_itself))
    elif prepared.body.logprobs is not None:
        logprobs = TokenLogprobsList(content=await encode_entries(delta.logprobs, prepared.formatter.by_id))
    return TokensChoice(
        index=index,
        token_ids=delta.token_ids,
        text=text if body.output_mode == "text" else None,
        logprobs=logprobs,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
    )
