"""From the fields of a request to a beam search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.engine.client.sampling_params import SamplingParams
from quire.protocol.beams import BeamFields
from quire.protocol.errors import InvalidRequest
from quire.serving.models import ServedModel

# Of a request, with the values that leave the model's own probabilities, by which beams are ranked, as they are.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "stop": ([], ""),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "prompt_logprobs": (),
}
_WITHOUT_EFFECT = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "seed": None}


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """The settings of a request with beam search.

    Attributes:
        width: number of beams, and of answers to each prompt.
        length_penalty: power of its length by which a beam's log-probability is divided.
        eos_token_ids: end a beam.
        stop_token_ids: end a beam, and are its stop reason.
        logprobs: number of alternatives to report at each token; None: nothing is reported.
        forbids: whether an answer may not have a token at an index; None: it may have all tokens anywhere.
    """

    width: int
    length_penalty: float
    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    logprobs: int | None
    forbids: Callable[[int, int], bool] | None = None


def beam_options(body: BeamFields, params: SamplingParams, model: ServedModel, width: int) -> BeamOptions | None:
    """The beam search options of a request; None without beam search.

    Args:
        body: the request, whose fields have been checked.
        params: sampling parameters of the request.
        model: the model whose engine generates.
        width: number of beams.

    Raises:
        InvalidRequest: a field cannot be combined with beam search.
    """
    if not body.use_beam_search:
        return None
    for name, neutral in _REFUSED.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise InvalidRequest(f"`{name}` cannot be combined with `use_beam_search`.", name)
    for name in ("allowed_token_ids", "logprob_token_ids"):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"`{name}` cannot be combined with `use_beam_search`.", name)
    if params.grammar:
        raise InvalidRequest(
            "`use_beam_search` cannot be combined with structured outputs or required tool calls.", "use_beam_search"
        )
    if params.prompt_logprobs is not None:
        raise InvalidRequest("`echo` with `logprobs` cannot be combined with `use_beam_search`.", "echo")
    if width > model.info.vocab_size:
        raise InvalidRequest(f"`n` may be at most {model.info.vocab_size}, the number of tokens, for beam search.", "n")
    return BeamOptions(
        width, body.length_penalty, frozenset(params.eos_token_ids), params.stop_token_ids, params.logprobs
    )


def unused_with_beams(body: BeamFields) -> list[str]:
    """Names of fields that beam search, which draws nothing, does not use."""
    if not body.use_beam_search:
        return []
    return [name for name, neutral in _WITHOUT_EFFECT.items() if getattr(body, name) not in (None, neutral)]
