"""What the sampling of a row needs, from its parameters. The samplers of the host and of the device read the same."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from quire.engine.client.sampling_params import SamplingParams

MAX_BIASES = 1024  # of a row that is sampled on the device
_ALWAYS = (1 << 31) - 1  # the limit of biases that do not end
# What the device can follow. A parameter that is not named here is applied by the host: bad words and rules of
# timestamps depend on earlier tokens in ways that only the host follows, and it computes what listed tokens report.
# Grammars depend on earlier tokens too, but what they allow is a mask, which the host sends.
_ON_DEVICE = (
    {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"}
    | {"max_tokens", "min_tokens", "eos_token_ids", "stop_token_ids", "logit_bias", "begin_suppress_tokens"}
    | {"allowed_tokens", "grammar", "grammar_size", "logprobs", "prompt_logprobs", "prompt_token_ids", "token_probs"}
)
_ONLY_ON_HOST = [name for name in SamplingParams.__struct_fields__ if name not in _ON_DEVICE]
_DEFAULTS = SamplingParams(max_tokens=1)


class TokenBias(NamedTuple):
    """What is added to the logit of a token while fewer than `limit` tokens were generated."""

    token: int
    value: float
    limit: int


@dataclass(frozen=True, slots=True)
class RowUse:
    """What is needed to sample a token of a row.

    Attributes:
        random: a token is drawn from the whole vocabulary.
        ranked: a token is drawn from those with the largest logits (top-k, top-p).
    """

    random: bool
    ranked: bool
    biased: bool
    penalized: bool
    masked: bool
    grammar: bool
    logprobs: int | None

    @property
    def adjusts(self) -> bool:
        """Whether logits change before a token is chosen."""
        return self.biased or self.penalized or self.masked or self.grammar


def row_use(params: SamplingParams) -> RowUse:
    """Return what is needed to sample a token with these parameters."""
    ranked = is_ranked(params)
    return RowUse(
        random=params.temperature > 0 and not ranked,
        ranked=ranked,
        biased=bool(token_biases(params)),
        penalized=is_penalized(params),
        masked=params.allowed_tokens is not None,
        grammar=bool(params.grammar),
        logprobs=params.logprobs,
    )


def fits_device(params: SamplingParams) -> bool:
    """Whether a request can be sampled on the device; else the host samples it."""
    if any(getattr(params, name) != getattr(_DEFAULTS, name) for name in _ONLY_ON_HOST):
        return False
    return len(token_biases(params)) <= MAX_BIASES


def is_ranked(params: SamplingParams) -> bool:
    """Whether a token is drawn from those with the largest logits."""
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1)


def is_penalized(params: SamplingParams) -> bool:
    """Whether logits depend on how often a token occurred."""
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def token_biases(params: SamplingParams) -> list[TokenBias]:
    """Return `logit_bias`, and -inf for ends before `min_tokens` and for `begin_suppress_tokens`.

    A token may occur several times, but at most one of its values is finite.
    """
    ends = {*params.eos_token_ids, *params.stop_token_ids} if params.min_tokens else set[int]()
    return [
        *(TokenBias(token, bias, _ALWAYS) for token, bias in params.logit_bias.items()),
        *(TokenBias(token, -math.inf, min(params.min_tokens, _ALWAYS)) for token in ends),
        *(TokenBias(token, -math.inf, 1) for token in {*params.begin_suppress_tokens}),
    ]
