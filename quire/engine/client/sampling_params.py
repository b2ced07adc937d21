"""SamplingParams: parameters of a request that generates tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.engine.client.token_mask import TokenMask, has_other_token

MAX_LOGPROB_TOKEN_IDS = 128  # as in vLLM


class TimestampRule(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokens may follow in a transcription with timestamps: these come in pairs and never go back.

    A timestamp is also chosen whenever all timestamps together are likelier than any other token (Radford et al. 2022).

    Attributes:
        begin: token of the timestamp 0.00; all tokens from it on are timestamps.
        no_timestamps: the token that turns timestamps off; it is never sampled.
        end: the end token.
        max_initial: the first timestamp is at most `begin + max_initial`; None: any.
    """

    begin: int
    no_timestamps: int
    end: int
    max_initial: int | None = None


class TokenProbs(msgspec.Struct, frozen=True):
    """Ask for the probabilities that the model gives these tokens after a position of the prompt.

    At whisper's start token, these are the probabilities of no speech and of each language. They are those of all
    logits, before any sampling parameter.
    """

    position: int
    token_ids: tuple[int, ...]


class PromptTokenIds(msgspec.Struct, frozen=True):
    """Ask for the log-probabilities that the model gives listed tokens at positions of the prompt.

    Attributes:
        start: row 0 is about the prompt's token `start + 1`, row 1 about the next one, and so on.
        width: tokens of a row.
        token_ids: those of all rows; -1 stands for none.
    """

    start: int
    width: int
    token_ids: NDArray[np.int32]

    def row(self, position: int) -> tuple[int, ...]:
        """The tokens listed for the prompt's token at a position."""
        first = (position - 1 - self.start) * self.width
        return tuple(
            token for token in self.token_ids[max(0, first) : max(0, first + self.width)].tolist() if token >= 0
        )


@dataclass(frozen=True, slots=True)
class Number:
    """Declare a number of `SamplingNumbers`.

    Attributes:
        low, high: bounds that the core checks. They are wider than those of any API; values within them do not overflow
            float32.
        keeps_ranking: the most likely token stays the most likely, so that greedy decoding and beam search, which draw
            nothing, do not depend on it.
    """

    low: float
    high: float
    keeps_ranking: bool = False


class SamplingNumbers(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The numbers among the sampling parameters. A number has no effect at its default.

    A new one is declared here and, with the bounds of requests, in `quire.protocol.sampling`. Code that passes numbers
    on reads these two declarations. Only APIs that have some of the numbers name those: Anthropic's in requests, and
    responses in their answers.
    """

    temperature: Annotated[float, Number(0.0, 1e6, keeps_ranking=True)] = 1.0  # 0: greedy
    top_p: Annotated[float, Number(0.0, 1.0, keeps_ranking=True)] = 1.0
    top_k: Annotated[int, Number(0, (1 << 31) - 1, keeps_ranking=True)] = 0  # 0: off
    min_p: Annotated[float, Number(0.0, 1.0, keeps_ranking=True)] = 0.0
    presence_penalty: Annotated[float, Number(-1e4, 1e4)] = 0.0
    frequency_penalty: Annotated[float, Number(-1e4, 1e4)] = 0.0
    repetition_penalty: Annotated[float, Number(1e-3, 1e3)] = 1.0


NUMBERS: Mapping[str, Number] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(SamplingNumbers, include_extras=True).items()
}
GREEDY = SamplingNumbers(temperature=0.0)  # always the most likely token


class SamplingParams(SamplingNumbers, frozen=True, kw_only=True, omit_defaults=True, tag="generate"):
    """Parameters of a request that generates tokens. The API and `quire.engine.core.validation` check the values.

    Its size is bounded for any request: each of the sequences of a request is sent with a copy.
    """

    max_tokens: int
    min_tokens: int = 0
    seed: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # finish the sequence without a stop_reason
    stop_token_ids: frozenset[int] = frozenset()  # finish the sequence; the token is its stop_reason
    logit_bias: dict[int, float] = {}
    allowed_tokens: TokenMask | None = None  # None: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be generated
    logprobs: int | None = None  # number of top tokens to report beside the sampled token
    logprob_token_ids: tuple[int, ...] = ()  # tokens to report in place of the top tokens; needs `logprobs`
    prompt_logprobs: int | None = None
    prompt_token_ids: PromptTokenIds | None = None  # to report in place of the top tokens; needs `prompt_logprobs`
    grammar: str = ""  # constrains the output (see `quire.engine.client.grammar`); empty: no constraint
    grammar_size: int = 0  # bytes that the compiled grammar takes; 0: not known
    begin_suppress_tokens: tuple[int, ...] = ()  # must not be the first token that is generated
    timestamp_rule: TimestampRule | None = None
    token_probs: TokenProbs | None = None  # reported with the first token

    def has_allowed_token(self, vocab_size: int) -> bool:
        """Whether at least one token is allowed at every position, judging by the parameters alone."""
        forbidden = {word[0] for word in self.bad_words if len(word) == 1} | {*self.begin_suppress_tokens}
        if self.min_tokens > 0:
            forbidden.update(self.eos_token_ids, self.stop_token_ids)
        if self.allowed_tokens is not None:
            return has_other_token(self.allowed_tokens, forbidden)
        return len(forbidden) < vocab_size
