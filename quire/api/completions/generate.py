"""POST /inference/v1/generate, and the two halves of it: /v1/chat/completions/render and /v1/completions/render."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.api.answers.grammar_writer import as_lark
from quire.api.chat.prepare import prepare_chat
from quire.api.completions.prepare import CompletionCall, prepare_completion
from quire.api.http import fields
from quire.api.http.body import StrictRoute, request_of
from quire.api.http.errors import InvalidRequest
from quire.api.http.identity import answer_id
from quire.api.http.sse import EventStream, answer, event
from quire.api.protocol.chat import ChatLogprobs, ChatRequest
from quire.api.protocol.common import ERRORS, streamed
from quire.api.protocol.completions import CompletionRequest
from quire.api.protocol.generate import Rendered, TokensAnswer, TokensChoice, TokensRequest
from quire.api.protocol.structured import MOST_GRAMMAR
from quire.api.serving.generation import admit, collect, run
from quire.api.serving.models import Services
from quire.engine.wire.stream import Delta, GenerateRequest
from quire.multimodal.renderer import Prompt

_OUTSIDE = (
    "model", "stream", "stream_options", "cache_salt", "priority", "request_id", "return_token_ids", "return_metrics",
    "return_tokens_as_token_ids",
)  # fmt: skip


def router(services: Services) -> APIRouter:
    """The endpoints."""
    routes = APIRouter(route_class=StrictRoute)

    @routes.post("/inference/v1/generate", responses=streamed(TokensAnswer), response_model=None)
    async def generate(body: TokensRequest, request: Request) -> Response:
        """Continue a prompt of tokens."""
        headers = {
            **fields.judge(body, strict=services.strict_fields),
            **fields.judge(body.sampling_params, strict=services.strict_fields, unread=_idle(body)),
        }
        model = services.model(body.model)
        call = await prepare_completion(
            _as_completion(body), model, services, answer_id("generate-tokens", request, body.request_id)
        )
        free = admit(model.client, len(call.requests), "sampling_params.n")
        if body.stream:
            return EventStream(_chunks(call, body), headers, free, keepalive=services.sse_keepalive)
        return await answer(request, _whole(call, body), headers, free)

    @routes.post("/v1/chat/completions/render", responses=ERRORS)
    async def render_chat(body: ChatRequest, request: Request, response: Response) -> Rendered:
        """What the model would see of a conversation; nothing is generated."""
        call = await prepare_chat(body, services, answer_id("chatcmpl", request, body.request_id))
        response.headers.update(fields.judge(body, strict=services.strict_fields, unread=call.unread))
        return _rendered(call.head.id, call.head.model, body, call.prompt, call.requests[0])

    @routes.post("/v1/completions/render", responses=ERRORS)
    async def render_completion(body: CompletionRequest, request: Request, response: Response) -> list[Rendered]:
        """What the model would see of each prompt; nothing is generated."""
        model = services.model(body.model)
        response.headers.update(fields.judge(body, strict=services.strict_fields))
        call = await prepare_completion(body, model, services, answer_id("cmpl", request, body.request_id))
        return [
            _rendered(f"{call.id}-{place}", model.names[0], body, prompt, call.requests[place * call.n])
            for place, prompt in enumerate(call.prompts)
        ]

    return routes


def _idle(body: TokensRequest) -> list[str]:
    """Names in sampling_params of what belongs beside them."""
    return [f"sampling_params.{name}" for name in _OUTSIDE if name in body.sampling_params.model_fields_set]


def _as_completion(body: TokensRequest) -> CompletionRequest:
    left_out = {"detokenize", *_OUTSIDE, *(body.sampling_params.model_extra or ())}
    given = body.sampling_params.model_dump(by_alias=True, exclude=left_out, exclude_none=True)
    if not body.sampling_params.detokenize and body.sampling_params.stop:
        raise InvalidRequest("`stop` needs `detokenize`.", "sampling_params.stop")
    own = {
        "model": body.model, "prompt": body.token_ids, "stream": body.stream, "cache_salt": body.cache_salt,
        "priority": body.priority, "max_tokens": body.sampling_params.max_tokens,
    }  # fmt: skip
    return request_of(CompletionRequest, {**given, **own})


async def _whole(call: CompletionCall, body: TokensRequest) -> TokensAnswer:
    tally = call.tally()
    done = await collect(call.model.client, call.requests)
    for index, one in enumerate(done):
        tally.add(index, one.whole)
    reported = done[0].whole.prompt_logprobs
    return TokensAnswer(
        request_id=call.id,
        output_mode=body.output_mode,
        choices=[_choice(call, body, index, one.text, one.whole) for index, one in enumerate(done)],
        prompt_logprobs=None if reported is None else call.formatter.prompt(reported),
        usage=tally.usage(),
    )


async def _chunks(call: CompletionCall, body: TokensRequest) -> AsyncGenerator[bytes, None]:
    tally = call.tally()
    head = {"request_id": call.id, "output_mode": body.output_mode}
    async with aclosing(run(call.model.client, call.requests)) as deltas:
        async for index, delta in deltas:
            tally.add(index, delta)
            yield event({**head, "choices": [_choice(call, body, index, delta.text, delta).model_dump()]})
    if body.stream_options is not None and body.stream_options.include_usage:
        yield event({**head, "choices": [], "usage": tally.usage().model_dump()})


def _choice(call: CompletionCall, body: TokensRequest, index: int, text: str, delta: Delta) -> TokensChoice:
    logprobs = None
    if body.sampling_params.logprobs is not None:
        logprobs = ChatLogprobs.model_validate({"content": call.formatter.chat(delta.logprobs)})
    return TokensChoice(
        index=index,
        token_ids=delta.token_ids,
        text=text if body.output_mode == "text" else None,
        logprobs=logprobs,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
    )


def _rendered(
    request_id: str, model: str, body: ChatRequest | CompletionRequest, prompt: Prompt, request: GenerateRequest
) -> Rendered:
    params = request.params
    sampling: dict[str, Any] = {
        "max_tokens": params.max_tokens, "min_tokens": params.min_tokens, "temperature": params.temperature,
        "top_p": params.top_p, "top_k": params.top_k, "min_p": params.min_p, "seed": params.seed,
        "presence_penalty": params.presence_penalty, "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty, "stop": list(request.text.stop),
        "stop_token_ids": list(params.stop_token_ids), "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs, "skip_special_tokens": request.text.skip_special_tokens,
        "include_stop_str_in_output": request.text.include_stop, "ignore_eos": body.ignore_eos, "n": body.n,
        "logit_bias": body.logit_bias, "allowed_token_ids": body.allowed_token_ids, "bad_words": body.bad_words,
        "structured_outputs": _structure(params.grammar),
    }  # fmt: skip
    return Rendered(
        request_id=request_id,
        model=model,
        token_ids=prompt.token_ids.tolist(),
        prompt=prompt.text,
        sampling_params={name: value for name, value in sampling.items() if value is not None},
        stream=bool(body.stream),
        cache_salt=request.cache_salt,
        priority=request.priority,
    )


def _structure(grammar: str) -> dict[str, str] | None:
    """What the answer is held to, its reasoning and calls included, in one grammar."""
    if not grammar:
        return None
    text = as_lark(grammar)
    if len(text) > MOST_GRAMMAR:
        raise InvalidRequest(f"The grammar of the answer has {len(text)} characters, more than a request may have.")
    return {"grammar": text}
