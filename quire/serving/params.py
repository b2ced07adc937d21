"""SamplingParams from a request. Only here are limits checked and defaults filled in."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.config.options import LimitOptions
from quire.engine.client.deadline import Deadline
from quire.engine.client.detokenizer import TextParams
from quire.engine.client.protocol import MediaItem
from quire.engine.client.records import SequenceGroup
from quire.engine.client.sampling_params import MAX_LOGPROB_TOKEN_IDS, SamplingParams
from quire.engine.client.stream import GenerateRequest
from quire.engine.client.token_mask import TokenMask, token_mask
from quire.parsing.structured.checker import CheckedGrammar
from quire.protocol.common import ChatAndCompletionFields, StreamOptions
from quire.protocol.errors import InvalidRequest, shorten
from quire.rendering.prompts import Prompt
from quire.serving.models import ServedModel, ServerState

_GREEDY_THRESHOLD = 1e-5  # lower temperatures mean greedy sampling
_MIN_TEMPERATURE = 0.01  # lower ones could overflow logits
_MIN_TOP_P = 1e-6  # lower ones may round to 0 in float32
_SEEDS = 1 << 64
_MAX_BAD_WORD_TOKENS = 4096  # each sequence is sent with all of them


def sampling_params(
    body: ChatAndCompletionFields,
    model: ServedModel,
    limits: LimitOptions,
    *,
    max_tokens: int,
    logprobs: int | None,
    grammar: CheckedGrammar | None = None,
) -> SamplingParams:
    """Sampling parameters of one sequence of a request.

    Raises:
        InvalidRequest: a field is out of bounds.
    """
    defaults = model.defaults
    _check_min_tokens(body.min_tokens, max_tokens)
    _check_limits(body, limits, logprobs)
    if body.priority and not model.priority_scheduling:
        raise InvalidRequest("`priority` requires a server with --scheduling-policy priority.", "priority")
    if grammar and body.ignore_eos:
        raise InvalidRequest(
            "`ignore_eos` cannot be combined with structured outputs, which end with an end-of-sequence token.",
            "ignore_eos",
        )
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=_temperature(defaults.temperature if body.temperature is None else body.temperature),
        top_p=max(_MIN_TOP_P, defaults.top_p if body.top_p is None else body.top_p),
        top_k=max(0, defaults.top_k if body.top_k is None else body.top_k),
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or defaults.repetition_penalty,
        seed=body.seed,
        eos_token_ids=() if body.ignore_eos else model.eos_token_ids,
        stop_token_ids=_stop_token_ids(body.stop_token_ids, model),
        logit_bias=_logit_bias(body.logit_bias or {}, model),
        allowed_tokens=_allowed_tokens(body.allowed_token_ids, model),
        bad_words=_bad_words(body.bad_words or (), model),
        logprobs=logprobs,
        logprob_token_ids=_logprob_token_ids(body.logprob_token_ids, logprobs, model),
        prompt_logprobs=body.prompt_logprobs,
        grammar="" if grammar is None else grammar.text,
        grammar_size=0 if grammar is None else grammar.size,
    )
    _check_choice(params, model.info.vocab_size)
    return params


def apply_server_defaults(body: ChatAndCompletionFields, model: ServedModel, state: ServerState) -> None:
    """Fill in fields whose values depend on the server or the model."""
    whole = model.info.vocab_size
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        value = getattr(body, name, None)
        if value == -1 or (state.limits.max_logprobs == -1 and (value or 0) > whole):
            setattr(body, name, whole)
    if body.return_tokens_as_token_ids is None:
        body.return_tokens_as_token_ids = state.tokens_as_ids
    if state.include_usage and body.stream:
        body.stream_options = (body.stream_options or StreamOptions()).model_copy(update={"include_usage": True})


def with_max_tokens(params: SamplingParams, max_tokens: int) -> SamplingParams:
    """The sampling parameters of another prompt of the same request.

    Raises:
        InvalidRequest: `min_tokens` is more.
    """
    _check_min_tokens(params.min_tokens, max_tokens)
    return msgspec.structs.replace(params, max_tokens=max_tokens)


def sequences_per_prompt(body: ChatAndCompletionFields, limits: LimitOptions) -> int:
    """The number of answers to each prompt.

    Raises:
        InvalidRequest: there are too many.
    """
    n = body.n or 1
    if n > limits.max_n:
        raise InvalidRequest(f"`n` may be at most {limits.max_n}, not {n}.", "n")
    return n


def generate_requests(
    body: ChatAndCompletionFields,
    prompt: Prompt,
    params: SamplingParams,
    limits: LimitOptions,
    visible_tokens: tuple[int, ...] = (),
    items: tuple[MediaItem, ...] = (),
) -> list[GenerateRequest]:
    """The `n` sequences of a request with one prompt; their seeds differ.

    Args:
        body: the request.
        prompt: the prompt that all of them continue.
        params: the first one's parameters.
        limits: limits of this server.
        visible_tokens: special tokens that are kept in the text.
        items: multimodal items of the prompt.

    Raises:
        InvalidRequest: there are too many stop strings, or an empty one.
    """
    text = _text_params(body, limits, visible_tokens)
    # The prompt is the same for all of them. In a stream each sequence needs its log-probabilities at its start.
    others = params if body.stream else msgspec.structs.replace(params, prompt_logprobs=None, prompt_token_ids=None)
    count = sequences_per_prompt(body, limits)
    deadline = Deadline(body.timeout, limits.request_timeout)
    group = SequenceGroup(count, count)
    return [
        GenerateRequest(
            prompt=prompt.token_ids,
            params=msgspec.structs.replace(others if index else params, seed=_seed(params.seed, index)),
            text=text,
            priority=body.priority,
            cache_salt=body.cache_salt,
            deadline=deadline,
            items=items,
            group=group,
        )
        for index in range(count)
    ]


def truncate_prompt(prompt: Prompt, body: ChatAndCompletionFields, model: ServedModel) -> Prompt:
    """The last `truncate_prompt_tokens` tokens of the prompt, or the first ones; all if the field is not set.

    Raises:
        InvalidRequest: the field exceeds the context length.
    """
    keep = body.truncate_prompt_tokens
    if keep is None:
        return prompt
    limit = model.info.max_model_len
    if keep > limit:
        raise InvalidRequest(
            f"`truncate_prompt_tokens` must be at most the context length of {limit} tokens, not {keep}. "
            "Please request a smaller truncation size.",
            "truncate_prompt_tokens",
        )
    keep = limit - 1 if keep == -1 else keep
    ids = prompt.token_ids
    if keep >= len(ids):
        return Prompt(ids)
    return Prompt(ids[:keep] if body.truncation_side == "right" else ids[len(ids) - keep :])


def output_token_limit(prompt: Prompt, model: ServedModel, max_tokens: int | None) -> int:
    """The number of tokens that may be generated: `max_tokens`, or all that fit into the context if it is None.

    Raises:
        InvalidRequest: the prompt is empty, has tokens outside of the vocabulary, or is too long.
    """
    length, limit = len(prompt.token_ids), model.info.max_model_len
    if not length:
        raise InvalidRequest("The prompt is empty; it needs at least one token.", "prompt")
    if int(prompt.token_ids.max()) >= model.info.vocab_size or int(prompt.token_ids.min()) < 0:
        raise InvalidRequest(
            f"The prompt contains a token id outside of the vocabulary of {model.info.vocab_size} tokens.", "prompt"
        )
    if length + (max_tokens or 1) > limit:
        raise InvalidRequest(
            f"This model's maximum context length is {limit} tokens. However, your request has {length} input tokens"
            + (f" and asks for {max_tokens} output tokens" if max_tokens else ", and one output token must fit as well")
            + ". Please reduce the length of the input.",
            "input_tokens" if length >= limit or not max_tokens else "max_tokens",
        )
    if max_tokens is not None:
        return max_tokens
    return min(limit - length, model.defaults.max_tokens or limit)


def _check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    if min_tokens > max_tokens:
        raise InvalidRequest(f"`min_tokens` must be at most max_tokens={max_tokens}, not {min_tokens}.", "min_tokens")


def _check_limits(body: ChatAndCompletionFields, limits: LimitOptions, logprobs: int | None) -> None:
    for name, kind, value in (("logprobs", "sample", logprobs), ("prompt_logprobs", "prompt", body.prompt_logprobs)):
        if value is not None and 0 <= limits.max_logprobs < value:
            raise InvalidRequest(
                f"Requested {kind} logprobs of {value}, which is greater than max allowed: {limits.max_logprobs} "
                "(--max-logprobs)",
                name,
            )
    if len(body.bad_words or ()) > limits.max_bad_words:
        raise InvalidRequest(
            f"`bad_words` may have at most {limits.max_bad_words} words, not {len(body.bad_words or ())}.", "bad_words"
        )


def _text_params(body: ChatAndCompletionFields, limits: LimitOptions, visible_tokens: tuple[int, ...]) -> TextParams:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stop) > limits.max_stop:
        raise InvalidRequest(f"`stop` may have at most {limits.max_stop} strings, not {len(stop)}.", "stop")
    if "" in stop:
        raise InvalidRequest("`stop` cannot contain an empty string.", "stop")
    return TextParams(
        stop=stop,
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        shown=visible_tokens,
        min_tokens=body.min_tokens,
    )


def _seed(seed: int | None, index: int) -> int | None:
    """The seed of the answer with this index. It wraps around at 64 bits."""
    return None if seed is None else (seed + index + _SEEDS // 2) % _SEEDS - _SEEDS // 2


def _temperature(value: float) -> float:
    return 0.0 if value < _GREEDY_THRESHOLD else max(value, _MIN_TEMPERATURE)


def _check_vocabulary(largest: int, model: ServedModel, field: str) -> None:
    size = model.info.vocab_size
    if largest >= size:
        raise InvalidRequest(f"Token id {largest} in `{field}` is outside of the vocabulary of {size} tokens.", field)


def _stop_token_ids(tokens: NDArray[np.int32] | None, model: ServedModel) -> frozenset[int]:
    if tokens is None:
        return frozenset()
    _check_vocabulary(int(tokens.max(initial=0)), model, "stop_token_ids")
    return frozenset(tokens.tolist())


def _logprob_token_ids(tokens: NDArray[np.int32] | None, logprobs: int | None, model: ServedModel) -> tuple[int, ...]:
    if tokens is None or not len(tokens):
        return ()
    if len(tokens) > MAX_LOGPROB_TOKEN_IDS:
        raise InvalidRequest(
            f"`logprob_token_ids` may have at most {MAX_LOGPROB_TOKEN_IDS} tokens, not {len(tokens)}.",
            "logprob_token_ids",
        )
    if logprobs is None:
        raise InvalidRequest("When using `logprob_token_ids`, `logprobs` must be set.", "logprob_token_ids")
    _check_vocabulary(int(tokens.max()), model, "logprob_token_ids")
    return tuple(dict.fromkeys(tokens.tolist()))


def _allowed_tokens(tokens: NDArray[np.int32] | None, model: ServedModel) -> TokenMask | None:
    if tokens is None:
        return None
    if not len(tokens):
        raise InvalidRequest("`allowed_token_ids` must not be empty.", "allowed_token_ids")
    _check_vocabulary(int(tokens.max(initial=0)), model, "allowed_token_ids")
    return token_mask(tokens, model.info.vocab_size)


def _logit_bias(bias: dict[str, float], model: ServedModel) -> dict[int, float]:
    try:
        parsed = {int(token): max(-100.0, min(100.0, value)) for token, value in bias.items()}
    except ValueError as error:
        raise InvalidRequest(
            f"The keys of `logit_bias` must be token ids: {shorten(str(error))}", "logit_bias"
        ) from error
    if any(token < 0 for token in parsed):
        raise InvalidRequest("The keys of `logit_bias` must be token ids.", "logit_bias")
    _check_vocabulary(max(parsed, default=0), model, "logit_bias")
    return parsed


def _bad_words(words: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Tokens of each word, both at the start of a text and after a space."""
    if any(not word.strip() for word in words):
        raise InvalidRequest("`bad_words` cannot contain an empty word.", "bad_words")
    tokenizer, size = model.renderer.tokenizer, model.info.vocab_size
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not tokens or max(tokens) >= size:
                raise InvalidRequest(
                    f"`bad_words`: {word!r} cannot be tokenized with this model's vocabulary.", "bad_words"
                )
            found[tokens] = None
    total = sum(map(len, found))
    if total > _MAX_BAD_WORD_TOKENS:
        raise InvalidRequest(
            f"`bad_words` may have at most {_MAX_BAD_WORD_TOKENS} tokens in total, where each word counts twice, "
            f"without and with a space in front of it; these have {total}.",
            "bad_words",
        )
    return tuple(found)


def _check_choice(params: SamplingParams, vocab_size: int) -> None:
    """Refuse requests that exclude every possible first token."""
    if params.has_allowed_token(vocab_size):
        return
    if params.allowed_tokens is not None:
        raise InvalidRequest(
            "`bad_words` and `min_tokens` exclude every allowed token; one of `allowed_token_ids` must remain.",
            "allowed_token_ids",
        )
    raise InvalidRequest("`bad_words` and `min_tokens` exclude every allowed token.", "bad_words")
