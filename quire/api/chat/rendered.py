"""Rendered prompts: what the render endpoints of all APIs return, a request for /inference/v1/generate."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from quire.api.chat.prepare import PreparedChat
from quire.engine.client.protocol import MediaItem, PictureItem
from quire.engine.client.sampling_params import NUMBERS
from quire.engine.client.stream import GenerateRequest
from quire.engine.client.token_mask import token_ids
from quire.parsing.grammar_writer import as_lark
from quire.protocol.chat import ChatRequest
from quire.protocol.completions import CompletionRequest
from quire.protocol.errors import InvalidRequest
from quire.protocol.generate import MediaFeatures, MediaPlace, RenderedPrompt
from quire.protocol.structured import MAX_GRAMMAR_LENGTH
from quire.rendering.prompts import Prompt
from quire.rendering.tokenizer import Tokenizer


def rendered_chat(prepared: PreparedChat) -> RenderedPrompt:
    """Return the prompt of a conversation of any API.

    Raises:
        InvalidRequest: no request for tokens is equal to it.
    """
    head = prepared.head
    return rendered(head.id, head.model, prepared.body, prepared.prompt, prepared.requests[0])


def rendered(
    request_id: str, model: str, body: ChatRequest | CompletionRequest, prompt: Prompt, request: GenerateRequest
) -> RenderedPrompt:
    """Return a prompt and its sampling parameters as a request for tokens.

    Raises:
        InvalidRequest: no request for tokens is equal to it.
    """
    params = request.params
    if body.use_beam_search:
        raise InvalidRequest("/inference/v1/generate has no beam search.", "use_beam_search")
    allowed = None if params.allowed_tokens is None else token_ids(params.allowed_tokens)
    sampling: dict[str, Any] = {
        **{name: getattr(params, name) for name in NUMBERS},
        "max_tokens": params.max_tokens, "min_tokens": params.min_tokens, "seed": params.seed,
        "stop": list(request.text.stop),
        "stop_token_ids": sorted(params.stop_token_ids), "logprobs": params.logprobs,
        "logprob_token_ids": list(params.logprob_token_ids) or None,
        "prompt_logprobs": params.prompt_logprobs, "skip_special_tokens": request.text.skip_special_tokens,
        "include_stop_str_in_output": request.text.include_stop, "ignore_eos": body.ignore_eos, "n": body.n,
        "logit_bias": body.logit_bias, "allowed_token_ids": allowed, "bad_words": body.bad_words,
        "structured_outputs": _structure(params.grammar),
    }  # fmt: skip
    return RenderedPrompt(
        request_id=request_id,
        model=model,
        token_ids=prompt.token_ids.tolist(),
        prompt=prompt.text,
        features=_features(request.items),
        sampling_params={name: value for name, value in sampling.items() if value is not None},
        stream=bool(body.stream),
        cache_salt=request.cache_salt,
        priority=request.priority,
    )


async def with_offsets(rendered: RenderedPrompt, tokenizer: Tokenizer) -> RenderedPrompt:
    """Return a prompt with the offsets of its tokens, where they are known."""
    if rendered.prompt is None or rendered.features is not None:
        return rendered
    offsets = await asyncio.to_thread(tokenizer.offsets, rendered.prompt, rendered.token_ids)
    return rendered.model_copy(update={"token_offsets": offsets})


def _features(items: Sequence[MediaItem]) -> MediaFeatures | None:
    """The hashes of media, by which caches know them, and their places."""
    if not items:
        return None
    hashes: dict[str, list[str]] = defaultdict(list)
    places: dict[str, list[MediaPlace]] = defaultdict(list)
    for item in items:
        kind = "audio" if not isinstance(item, PictureItem) else "video" if item.is_video else "image"
        hashes[kind].append(item.hash.hex())
        places[kind].append(MediaPlace(offset=item.start, length=item.length))
    return MediaFeatures(mm_hashes=hashes, mm_placeholders=places)


def _structure(grammar: str) -> dict[str, str] | None:
    """`structured_outputs` with one grammar for the whole answer, its reasoning and tool calls included."""
    if not grammar:
        return None
    text = as_lark(grammar)
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise InvalidRequest(
            f"The grammar of the answer has {len(text)} characters; a request may have at most {MAX_GRAMMAR_LENGTH}."
        )
    return {"grammar": text}
