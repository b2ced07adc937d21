"""From the fields of a request to a beam search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.engine.client.model_info import Generates
from quire.engine.client.sampling_params import NUMBERS, SamplingParams
from quire.protocol.errors import InvalidRequest
from quire.protocol.sampling import ConstraintFields, GenerationRequest, differs_from_greedy, is_empty
from quire.serving.models import ServedModel


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


def beam_options(body: GenerationRequest, params: SamplingParams, model: ServedModel, width: int) -> BeamOptions | None:
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
    kind = model.info.kind
    if isinstance(kind, Generates) and kind.longest_prompt is not None:  # beams are computed as prompts
        raise InvalidRequest(
            "`use_beam_search` is not supported by this model, whose prompts are read in both directions.",
            "use_beam_search",
        )
    refused = [name for name in ConstraintFields.model_fields if not is_empty(getattr(body, name))]
    refused += [
        name for name, number in NUMBERS.items() if not number.keeps_ranking and differs_from_greedy(body, name)
    ]
    refused += [name for name in ("prompt_logprobs", "logprob_token_ids") if getattr(body, name) is not None]
    for name in refused:
        raise InvalidRequest(f"`{name}` cannot be combined with `use_beam_search`.", name)
    if params.prompt_logprobs is not None:
        raise InvalidRequest("`echo` with `logprobs` cannot be combined with `use_beam_search`.", "echo")
    if width > model.info.vocab_size:
        raise InvalidRequest(f"`n` may be at most {model.info.vocab_size}, the number of tokens, for beam search.", "n")
    return BeamOptions(
        width, body.length_penalty, frozenset(params.eos_token_ids), params.stop_token_ids, params.logprobs
    )


def unused_with_beams(body: GenerationRequest) -> list[str]:
    """Names of fields that beam search, which draws nothing, does not use."""
    if not body.use_beam_search:
        return []
    numbers = [name for name, number in NUMBERS.items() if number.keeps_ranking and differs_from_greedy(body, name)]
    return numbers if body.seed is None else [*numbers, "seed"]
