"""SamplingParams from a request: the one place where its limits are checked and its defaults filled in."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.api.http.errors import InvalidRequest
from quire.api.protocol.common import GenerationFields
from quire.api.serving.models import ServedModel
from quire.config.options import LimitOptions
from quire.engine.wire.detokenizer import TextParams
from quire.engine.wire.protocol import SamplingParams
from quire.engine.wire.stream import GenerateRequest
from quire.multimodal.renderer import Prompt

_GREEDY_BELOW = 1e-5  # temperatures that leave nothing to chance
_COLDEST = 0.01  # smaller ones overflow some logits
_LEAST_TOP_P = 1e-6  # smaller ones may be 0 to a float32
_SEEDS = 1 << 64


def sampling_params(
    body: GenerationFields,
    model: ServedModel,
    limits: LimitOptions,
    *,
    max_tokens: int,
    logprobs: int | None,
    grammar: str = "",
) -> SamplingParams:
    """How to sample one sequence of a request.

    Raises:
        InvalidRequest: naming the field that is out of bounds.
    """
    defaults = model.defaults
    _check_limits(body, limits, max_tokens, logprobs)
    if body.priority and not model.by_priority:
        raise InvalidRequest("`priority` needs a server with --scheduling-policy priority.", "priority")
    if grammar and body.ignore_eos:
        raise InvalidRequest("`ignore_eos` leaves a structured output no way to end.", "ignore_eos")
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=_temperature(defaults.temperature if body.temperature is None else body.temperature),
        top_p=max(_LEAST_TOP_P, defaults.top_p if body.top_p is None else body.top_p),
        top_k=max(0, defaults.top_k if body.top_k is None else body.top_k),
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or defaults.repetition_penalty,
        seed=body.seed,
        eos_token_ids=() if body.ignore_eos else model.eos_token_ids,
        stop_token_ids=_in_vocabulary(body.stop_token_ids or (), model, "stop_token_ids"),
        logit_bias=_logit_bias(body.logit_bias or {}, model),
        allowed_token_ids=_allowed(body.allowed_token_ids, model),
        bad_words=_bad_words(body.bad_words or (), model),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        grammar=grammar,
    )
    _check_choice(params, model.info.vocab_size)
    return params


def sequences(
    body: GenerationFields,
    prompt: Prompt,
    params: SamplingParams,
    limits: LimitOptions,
    shown: tuple[int, ...] = (),
) -> list[GenerateRequest]:
    """The n sequences of a request behind one prompt; each draws with a seed of its own.

    `shown`: special tokens that are to stand in the text.

    Raises:
        InvalidRequest: too many stop strings, or an empty one.
    """
    text = _text_params(body, limits, shown)
    wanted = [seconds for seconds in (body.timeout, limits.request_timeout) if seconds]
    return [
        GenerateRequest(
            prompt=prompt.token_ids,
            params=msgspec.structs.replace(params, seed=_seed(params.seed, index)),
            text=text,
            priority=body.priority,
            cache_salt=body.cache_salt,
            timeout=min(wanted, default=None),
        )
        for index in range(body.n or 1)
    ]


def truncated(prompt: Prompt, body: GenerationFields, model: ServedModel) -> Prompt:
    """The prompt, or its end if the request wants it cut.

    Raises:
        InvalidRequest: it wants more than the context holds.
    """
    keep = body.truncate_prompt_tokens
    if keep is None:
        return prompt
    limit = model.info.max_model_len
    if keep > limit:
        raise InvalidRequest(
            f"`truncate_prompt_tokens` is {keep}, but the context holds {limit} tokens. "
            "Please request a smaller truncation size.",
            "truncate_prompt_tokens",
        )
    keep = limit - 1 if keep == -1 else keep
    return Prompt(
        prompt.token_ids[len(prompt.token_ids) - keep :] if keep < len(prompt.token_ids) else prompt.token_ids
    )


def room_for_output(prompt: Prompt, model: ServedModel, wanted: int | None) -> int:
    """Tokens that may be generated behind a prompt: those that are wanted, or all that fit.

    Raises:
        InvalidRequest: the prompt is empty, has foreign tokens, or does not fit with what is wanted.
    """
    length, limit = len(prompt.token_ids), model.info.max_model_len
    if not length:
        raise InvalidRequest("The prompt is empty; it needs at least one token.", "prompt")
    if int(prompt.token_ids.max()) >= model.info.vocab_size or int(prompt.token_ids.min()) < 0:
        raise InvalidRequest(f"A token id is out of the vocabulary of {model.info.vocab_size} tokens.", "prompt")
    if length + (wanted or 1) > limit:
        raise InvalidRequest(
            f"This model's maximum context length is {limit} tokens. However, your request has {length} input tokens"
            + (f" and asks for {wanted} output tokens" if wanted else "")
            + ". Please reduce the length of the input.",
            "input_tokens" if length >= limit or not wanted else "max_tokens",
        )
    if wanted is not None:
        return wanted
    return min(limit - length, model.defaults.max_tokens or limit)


def _check_limits(body: GenerationFields, limits: LimitOptions, max_tokens: int, logprobs: int | None) -> None:
    if (body.n or 1) > limits.max_n:
        raise InvalidRequest(f"`n` may be at most {limits.max_n}, not {body.n}.", "n")
    if body.min_tokens > max_tokens:
        raise InvalidRequest(
            f"`min_tokens` must be at most max_tokens={max_tokens}, not {body.min_tokens}.", "min_tokens"
        )
    for name, kind, value in (("logprobs", "sample", logprobs), ("prompt_logprobs", "prompt", body.prompt_logprobs)):
        if value is not None and value > limits.max_logprobs:
            raise InvalidRequest(
                f"Requested {kind} logprobs of {value}, which is greater than max allowed: {limits.max_logprobs}", name
            )
    if len(body.bad_words or ()) > limits.max_bad_words:
        raise InvalidRequest(f"`bad_words` takes at most {limits.max_bad_words} words.", "bad_words")


def _text_params(body: GenerationFields, limits: LimitOptions, shown: tuple[int, ...]) -> TextParams:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stop) > limits.max_stop:
        raise InvalidRequest(f"`stop` takes at most {limits.max_stop} strings, not {len(stop)}.", "stop")
    if "" in stop:
        raise InvalidRequest("`stop` cannot contain an empty string.", "stop")
    return TextParams(
        stop=stop,
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        shown=shown,
        min_tokens=body.min_tokens,
    )


def _seed(seed: int | None, index: int) -> int | None:
    """The seed of the index-th answer; behind the largest comes the smallest."""
    return None if seed is None else (seed + index + _SEEDS // 2) % _SEEDS - _SEEDS // 2


def _temperature(value: float) -> float:
    return 0.0 if value < _GREEDY_BELOW else max(value, _COLDEST)


def _in_vocabulary(tokens: Sequence[int], model: ServedModel, field: str) -> tuple[int, ...]:
    size = model.info.vocab_size
    for token in tokens:
        if token >= size:
            raise InvalidRequest(f"Token id {token} in `{field}` is out of the vocabulary of {size} tokens.", field)
    return tuple(tokens)


def _allowed(tokens: Sequence[int] | None, model: ServedModel) -> tuple[int, ...]:
    if tokens is not None and not tokens:
        raise InvalidRequest("`allowed_token_ids` must not be empty.", "allowed_token_ids")
    return _in_vocabulary(tokens or (), model, "allowed_token_ids")


def _logit_bias(bias: dict[str, float], model: ServedModel) -> dict[int, float]:
    try:
        parsed = {int(token): max(-100.0, min(100.0, value)) for token, value in bias.items()}
    except ValueError as error:
        raise InvalidRequest(f"The keys of `logit_bias` must be token ids: {error}", "logit_bias") from error
    if any(token < 0 for token in parsed):
        raise InvalidRequest("The keys of `logit_bias` must be token ids.", "logit_bias")
    _in_vocabulary(tuple(parsed), model, "logit_bias")
    return parsed


def _bad_words(words: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Each word as the tokens of its two spellings, at a text's start and behind a space."""
    if any(not word.strip() for word in words):
        raise InvalidRequest("`bad_words` cannot contain an empty word.", "bad_words")
    tokenizer, size = model.renderer.tokenizer, model.info.vocab_size
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not tokens or max(tokens) >= size:
                raise InvalidRequest(f"`bad_words`: {word!r} has no tokens in this model's vocabulary.", "bad_words")
            found[tokens] = None
    return tuple(found)


def _check_choice(params: SamplingParams, vocab_size: int) -> None:
    """Refuse requests that forbid every token that could come first."""
    if params.leaves_choice(vocab_size):
        return
    if params.allowed_token_ids:
        raise InvalidRequest(
            "`allowed_token_ids` leaves no token: `bad_words` or `min_tokens` forbid them all.", "allowed_token_ids"
        )
    raise InvalidRequest("`bad_words` or `min_tokens` forbid every token.", "bad_words")
