"""Validation of requests in the core, independent of the front end: an invalid request fails alone."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quire.engine.client.model_info import Generates, ModelKind, Pools, Transcribes
from quire.engine.client.pooling_params import PoolingParams, PoolingTask
from quire.engine.client.protocol import AddRequest, TokenArray
from quire.engine.client.sampling_params import MAX_LOGPROB_TOKEN_IDS, NUMBERS, SamplingParams
from quire.engine.client.streaming import DelayedStreamsInfo, TransducerInfo
from quire.engine.client.token_mask import is_token_mask
from quire.engine.core.item_validation import invalid_items, invalid_room

_MIN_TEMPERATURE = 1e-3  # lower temperatures above 0 overflow the logits
_MAX_BIAS = 1e6


def drop_unknown_end_tokens(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """Params without end tokens outside the vocabulary; some models' configs name such tokens."""
    known = tuple(token for token in params.eos_token_ids if 0 <= token < vocab_size)
    return params if len(known) == len(params.eos_token_ids) else msgspec.structs.replace(params, eos_token_ids=known)


def invalid_reason(message: AddRequest, kind: ModelKind, *, vocab_size: int, max_model_len: int) -> str | None:
    """Why a model cannot run the request; None if it can."""
    match kind:
        case Transcribes(kind="ctc"):
            return _invalid_ctc(message, kind)
        case TransducerInfo():
            return _invalid_transducer(message, kind, max_model_len)
    params = message.params
    generates = isinstance(params, SamplingParams)
    reason = invalid_tokens(message.prompt, vocab_size) or _invalid_length(
        len(message.prompt), max_model_len - 1 if generates else max_model_len
    )
    reason = reason or invalid_items(message.items, len(message.prompt), kind, max_model_len)
    reason = reason or _invalid_open(message) or _invalid_message_ends(message)
    if isinstance(kind, Generates) and kind.longest_prompt is not None:
        reason = reason or _invalid_prefix(message, kind.longest_prompt)
    if isinstance(kind, DelayedStreamsInfo):
        reason = reason or _invalid_streaming(message, kind, max_model_len)
    generated = params.max_tokens if isinstance(params, SamplingParams) else 0
    reason = reason or invalid_room(message.items, len(message.prompt), generated, max_model_len)
    if reason is not None:
        return reason
    if isinstance(params, PoolingParams):
        return _invalid_pooling(params, message, kind)
    if isinstance(kind, Pools):
        return f"the model does not generate; its tasks are {', '.join(kind.tasks)}"
    return (
        _invalid_numbers(params)
        or _invalid_ids(params, vocab_size)
        or _invalid_positions(params, len(message.prompt))
        or _no_choice(params, vocab_size)
    )


def invalid_tokens(tokens: TokenArray, vocab_size: int) -> str | None:
    """What is wrong with an array of token ids; None if nothing is."""
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        return "the prompt must be a 1-D array of integers"
    if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        return f"the prompt has token ids outside the vocabulary of {vocab_size}"
    return None


def _invalid_length(tokens: int, max_len: int) -> str | None:
    if not tokens:
        return "the prompt must be a non-empty list of token ids"
    return None if tokens <= max_len else f"the prompt has {tokens} tokens, but the context allows at most {max_len}"


def _invalid_message_ends(message: AddRequest) -> str | None:
    ends = message.message_ends
    if not 0 <= message.next_turn <= len(message.prompt):
        return f"next_turn must be from 0 to {len(message.prompt)}, not {message.next_turn}"
    if ends is None or not len(ends):
        return None
    if (
        ends.ndim != 1
        or ends.dtype.kind != "i"
        or ends[0] < 1
        or ends[-1] > len(message.prompt)
        or any(ends[1:] <= ends[:-1])
    ):
        return f"message_ends must be integers in ascending order from 1 to {len(message.prompt)}"
    return None


def _invalid_ctc(message: AddRequest, speech: Transcribes) -> str | None:
    params = message.params
    if not isinstance(params, PoolingParams) or params.task != "ctc":
        return "the model supports only the pooling task 'ctc'"
    if len(message.prompt):
        return "the model reads audio; the prompt must be empty"
    return invalid_items(message.items, 0, speech)


def _invalid_transducer(message: AddRequest, info: TransducerInfo, max_model_len: int) -> str | None:
    params = message.params
    if not isinstance(params, SamplingParams):
        return "the model only transcribes; it has no pooling tasks"
    if len(message.prompt):
        return "the model reads audio; the prompt must be empty"
    greedy = SamplingParams(
        max_tokens=params.max_tokens,
        temperature=0.0,
        seed=params.seed,
        eos_token_ids=params.eos_token_ids,
        logprobs=params.logprobs,
    )
    if params.max_tokens < 1 or params.logprobs not in (None, 0) or params != greedy:
        return (
            "the model always gives the most likely tokens: temperature must be 0, max_tokens at least 1, logprobs "
            "None or 0, and other sampling parameters have no other values than their defaults"
        )
    if (reason := invalid_items(message.items, 0, info)) is not None:
        return reason
    columns, most = sum(item.features.shape[1] for item in message.audio_items), max_model_len * info.columns_per_frame
    if columns > most:
        return f"the audio has {columns} columns of features, but the context allows at most {most}"
    return None if columns or message.open else "the audio is empty"


def _invalid_open(message: AddRequest) -> str | None:
    params = message.params
    if not message.open:
        return None
    if not isinstance(params, SamplingParams):
        return "only a request that generates may be open"
    if params.prompt_logprobs is not None or params.token_probs is not None or params.grammar:
        return "an open request has no prompt_logprobs, token_probs or grammar"
    return None


def _invalid_prefix(message: AddRequest, longest: int) -> str | None:
    """What is wrong with a prompt whose tokens attend to each other in both directions."""
    if message.open:
        return "the model attends to its prompt in both directions: the prompt must be complete"
    if len(message.prompt) > longest:
        return (
            f"the prompt has {len(message.prompt)} tokens; at most {longest} are accepted, since one step computes all "
            "of them: --max-num-batched-tokens"
        )
    return None


def _invalid_streaming(message: AddRequest, info: DelayedStreamsInfo, max_model_len: int) -> str | None:
    params = message.params
    if not isinstance(params, SamplingParams):
        return "the model only transcribes; it has no pooling tasks"
    if params.prompt_logprobs is not None or params.token_probs is not None or params.grammar:
        return "the model does not support prompt_logprobs, token_probs and grammar: it reads audio while it generates"
    frames = sum(item.features.shape[1] for item in message.audio_items) // info.columns_per_frame
    if frames > max_model_len:
        return f"the audio has {frames} frames, but the context allows at most {max_model_len}"
    if not message.open and frames <= len(message.prompt):
        return f"the audio has {frames} frames; there must be more than the prompt's {len(message.prompt)} tokens"
    return None


def _invalid_pooling(params: PoolingParams, message: AddRequest, kind: ModelKind) -> str | None:
    tasks: tuple[PoolingTask, ...] = ("embed", "token_embed")  # hidden states, which each model has
    if isinstance(kind, Pools):
        tasks = kind.tasks
    elif isinstance(kind, Transcribes):
        tasks = ("align",) if kind.aligns_words else ()
        longest = kind.positions(message.audio_items[0].features.shape[1])
        if params.num_positions is not None and not 1 <= params.num_positions <= longest:
            return f"num_positions must be from 1 to {longest}, not {params.num_positions}"
    if params.task not in tasks:
        return f"the model has no task {params.task!r}; its pooling tasks are {', '.join(tasks) or 'none'}"
    if params.dimensions is not None and params.dimensions < 1:
        return f"dimensions must be at least 1, not {params.dimensions}"
    if not 0 <= params.skip_tokens < len(message.prompt):
        return f"skip_tokens must be from 0 to {len(message.prompt) - 1}, not {params.skip_tokens}"
    if message.second_text_start is not None and not 0 <= message.second_text_start <= len(message.prompt):
        return f"second_text_start must be from 0 to {len(message.prompt)}, not {message.second_text_start}"
    if message.second_text_end is not None and not 0 <= message.second_text_end <= len(message.prompt):
        return f"second_text_end must be from 0 to {len(message.prompt)}, not {message.second_text_end}"
    return None


def _invalid_numbers(params: SamplingParams) -> str | None:
    for name, number in NUMBERS.items():
        if not number.low <= getattr(params, name) <= number.high:  # NaN too
            return f"{name} must be between {number.low:g} and {number.high:g}, not {getattr(params, name)}"
    if 0 < params.temperature < _MIN_TEMPERATURE:
        return f"temperature must be 0 or at least {_MIN_TEMPERATURE:g}, not {params.temperature}"
    for token, bias in params.logit_bias.items():
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            return f"the bias of token {token} must be between {-_MAX_BIAS:g} and {_MAX_BIAS:g}, not {bias}"
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) < 0:
            return f"{name} must not be negative"
    if len(params.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
        return f"logprob_token_ids has {len(params.logprob_token_ids)} tokens, more than {MAX_LOGPROB_TOKEN_IDS}"
    if params.prompt_token_ids is not None and params.prompt_logprobs is None:
        return "prompt_token_ids needs prompt_logprobs"
    if params.logprob_token_ids and params.logprobs is None:
        return "logprob_token_ids needs logprobs"
    return None


def _invalid_ids(params: SamplingParams, vocab_size: int) -> str | None:
    if not all(params.bad_words):
        return "bad_words has an empty word"
    if params.allowed_tokens is not None and not is_token_mask(params.allowed_tokens, vocab_size):
        return f"allowed_tokens is not a bitmask of tokens of the vocabulary of {vocab_size}"
    if (listed := params.prompt_token_ids) is not None and listed.token_ids.max(initial=-1) >= vocab_size:
        return f"prompt_token_ids has a token id outside the vocabulary of {vocab_size}"
    for name, token in _named_ids(params):
        if not 0 <= token < vocab_size:
            return f"{name} has token id {token}, outside the vocabulary of {vocab_size}"
    return None


def _named_ids(params: SamplingParams) -> Iterator[tuple[str, int]]:
    for name in ("stop_token_ids", "logit_bias", "logprob_token_ids"):
        for token in getattr(params, name):
            yield name, token
    for word in params.bad_words:
        for token in word:
            yield "bad_words", token
    for token in params.begin_suppress_tokens:
        yield "begin_suppress_tokens", token
    for token in () if params.token_probs is None else params.token_probs.token_ids:
        yield "token_probs", token
    if (rule := params.timestamp_rule) is not None:
        for token in (rule.begin, rule.no_timestamps, rule.end):
            yield "timestamp_rule", token


def _invalid_positions(params: SamplingParams, prompt_len: int) -> str | None:
    probs, rule = params.token_probs, params.timestamp_rule
    listed = params.prompt_token_ids
    if listed is not None and (
        listed.start < 0 or listed.width < 1 or len(listed.token_ids) != listed.width * (prompt_len - 1 - listed.start)
    ):
        return "prompt_token_ids has another number of rows than the prompt has tokens after its start"
    if probs is not None and not 0 <= probs.position < prompt_len:
        return f"token_probs has position {probs.position}, which is not in the prompt"
    if rule is not None and rule.max_initial is not None and rule.max_initial < 0:
        return f"timestamp_rule has max_initial {rule.max_initial}, which is negative"
    return None


def _no_choice(params: SamplingParams, vocab_size: int) -> str | None:
    return None if params.has_allowed_token(vocab_size) else "bad_words and min_tokens exclude every allowed token"
