"""Why a core cannot run a request, whatever the front end let through: one request must never end the loop."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quire.engine.wire.protocol import AddRequest, SamplingParams, TokenArray

# Wider than any API's limits; within them nothing overflows float32.
_RANGES = {
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-1e4, 1e4),
    "frequency_penalty": (-1e4, 1e4),
    "repetition_penalty": (1e-3, 1e3),
}
_COLDEST = 1e-3  # lower temperatures above 0 overflow logits
_MOST_BIAS = 1e6


def without_foreign_ends(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """Params without the end tokens that the model cannot give; configs name such."""
    own = tuple(token for token in params.eos_token_ids if 0 <= token < vocab_size)
    return params if len(own) == len(params.eos_token_ids) else msgspec.structs.replace(params, eos_token_ids=own)


def objection(message: AddRequest, *, vocab_size: int, max_model_len: int) -> str | None:
    """Why the request cannot be run; none if it can."""
    return (
        _to_prompt(message.prompt, vocab_size, max_model_len)
        or _to_numbers(message.params)
        or _to_ids(message.params, vocab_size)
        or _to_choice(message.params, vocab_size)
    )


def _to_prompt(prompt: TokenArray, vocab_size: int, max_model_len: int) -> str | None:
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu" or not len(prompt):
        return "the prompt is not a non-empty list of token ids"
    if len(prompt) >= max_model_len:
        return f"the prompt has {len(prompt)} tokens, but the context holds {max_model_len}"
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
        return "the prompt has token ids outside the vocabulary"
    return None


def _to_numbers(params: SamplingParams) -> str | None:
    for name, (least, most) in _RANGES.items():
        if not least <= getattr(params, name) <= most:  # catches not-a-number too
            return f"{name} must be within {least:g} and {most:g}, not {getattr(params, name)}"
    if 0 < params.temperature < _COLDEST:
        return f"temperature must be 0 or at least {_COLDEST:g}, not {params.temperature}"
    for token, bias in params.logit_bias.items():
        if not -_MOST_BIAS <= bias <= _MOST_BIAS:
            return f"the bias of token {token} must be within {-_MOST_BIAS:g} and {_MOST_BIAS:g}, not {bias}"
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) < 0:
            return f"{name} must not be negative"
    return None


def _to_ids(params: SamplingParams, vocab_size: int) -> str | None:
    if not all(params.bad_words):
        return "bad_words has an empty word"
    for name, token in _named_ids(params):
        if not 0 <= token < vocab_size:
            return f"{name} has token id {token}, outside the vocabulary of {vocab_size}"
    return None


def _named_ids(params: SamplingParams) -> Iterator[tuple[str, int]]:
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token in getattr(params, name):
            yield name, token
    for word in params.bad_words:
        for token in word:
            yield "bad_words", token


def _to_choice(params: SamplingParams, vocab_size: int) -> str | None:
    return (
        None
        if params.leaves_choice(vocab_size)
        else "no token is left to choose: bad_words and min_tokens forbid all allowed tokens"
    )
