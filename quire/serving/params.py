"""From the fields of a request to its sequences. Only here are limits checked and defaults filled in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.config.options import LimitOptions
from quire.engine.client.deadline import Deadline
from quire.engine.client.detokenizer import TextParams
from quire.engine.client.protocol import MediaItem, position_leap
from quire.engine.client.records import SequenceGroup
from quire.engine.client.sampling_params import (
    MAX_LOGPROB_TOKEN_IDS,
    NUMBERS,
    PromptTokenIds,
    SamplingNumbers,
    SamplingParams,
)
from quire.engine.client.stream import GenerateRequest
from quire.engine.client.token_mask import TokenMask, token_mask
from quire.parsing.structured.checker import CheckedGrammar
from quire.protocol.errors import InvalidRequest, shorten
from quire.protocol.sampling import GenerationRequest, NumberFields, StreamOptions
from quire.rendering.prompts import Prompt
from quire.serving.beams.options import BeamOptions, beam_options
from quire.serving.kv_transfer import TransferPlan, transfer_plan
from quire.serving.models import ServedModel, ServerState

_GREEDY_THRESHOLD = 1e-5  # lower temperatures mean greedy sampling
_MIN_TEMPERATURE = 0.01  # lower ones could overflow logits
_MIN_TOP_P = 1e-6  # lower ones may round to 0 in float32
_SEEDS = 1 << 64
_MAX_BAD_WORD_TOKENS = 4096  # each sequence is sent with all of them


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """What the sequences of a request have in common. All of its fields have been checked.

    Attributes:
        n: answers to each prompt.
        params: of a sequence with the shortest possible `max_tokens`, without a grammar.
        beams: the beam search; None: answers are sampled.
        transfer: what they have to do with other engines.
    """

    body: GenerationRequest
    model: ServedModel
    limits: LimitOptions
    n: int
    params: SamplingParams
    text: TextParams
    beams: BeamOptions | None
    transfer: TransferPlan

    def fit(self, prompt: Prompt) -> Prompt:
        """Return the prompt, cut to `truncate_prompt_tokens`.

        Raises:
            InvalidRequest: it is empty, has tokens outside of the vocabulary, or leaves too little room for the answer.
        """
        prompt = self._truncated(prompt)
        length, limit, most = len(prompt.token_ids), self.model.info.max_model_len, self.body.most_tokens
        if not length:
            raise InvalidRequest("The prompt is empty; it needs at least one token.", "prompt")
        if int(prompt.token_ids.max()) >= self.model.info.vocab_size or int(prompt.token_ids.min()) < 0:
            raise InvalidRequest(
                f"The prompt contains a token id outside of the vocabulary of {self.model.info.vocab_size} tokens.",
                "prompt",
            )
        if length + (most or 1) > limit:
            raise InvalidRequest(
                f"This model's maximum context length is {limit} tokens. However, your request has {length} input "
                + (
                    f"tokens and asks for {most} output tokens"
                    if most
                    else "tokens, and one output token must fit as well"
                )
                + f". Please {_advice(length, most, limit)}.",
                "input_tokens" if length >= limit or not most else "max_tokens",
            )
        if self.params.min_tokens > (max_tokens := self._max_tokens(length)):
            raise InvalidRequest(
                f"`min_tokens` must be at most max_tokens={max_tokens}, not {self.params.min_tokens}.", "min_tokens"
            )
        return prompt

    def requests(
        self, prompt: Prompt, grammar: CheckedGrammar | None = None, items: tuple[MediaItem, ...] = ()
    ) -> list[GenerateRequest]:
        """Return the `n` sequences that continue a prompt; their seeds differ.

        Args:
            prompt: a prompt that fits.
            grammar: constrains the answers.
            items: multimodal items of the prompt.

        Raises:
            InvalidRequest: a field cannot be combined with a grammar.
        """
        # Positions of a video's time leave less of the context than its tokens do.
        leap = max(0, sum(map(position_leap, items)))
        params = self._params(len(prompt.token_ids) + leap, grammar)
        # The prompt is the same for all. In a stream each sequence needs its log-probabilities at its start.
        others = (
            params if self.body.stream else msgspec.structs.replace(params, prompt_logprobs=None, prompt_token_ids=None)
        )
        deadline = Deadline(self.body.timeout, self.limits.request_timeout)
        group = SequenceGroup(self.n, self.n)
        return [
            GenerateRequest(
                prompt=prompt.token_ids,
                params=msgspec.structs.replace(others if index else params, seed=_seed(params.seed, index)),
                text=self.text,
                priority=self.body.priority,
                cache_salt=self.body.cache_salt,
                deadline=deadline,
                items=items,
                group=group,
                is_held=self.transfer.is_held,
                remote=self.transfer.remote,
                flow=self.transfer.flow,
                message_ends=prompt.message_ends,
                next_turn=prompt.next_turn,
            )
            for index in range(self.n)
        ]

    def _truncated(self, prompt: Prompt) -> Prompt:
        keep, limit, ids = self.body.truncate_prompt_tokens, self.model.info.max_model_len, prompt.token_ids
        if keep is None:
            return prompt
        if keep == -1:  # as much as leaves room for the answer
            keep = max(limit - (self.body.most_tokens or 1), 1)
        if keep >= len(ids):
            return Prompt(ids)
        return Prompt(ids[:keep] if self.body.truncation_side == "right" else ids[len(ids) - keep :])

    def _max_tokens(self, prompt_len: int) -> int:
        limit = self.model.info.max_model_len
        return self.body.most_tokens or max(1, min(limit - prompt_len, self.model.defaults.max_tokens or limit))

    def _params(self, prompt_len: int, grammar: CheckedGrammar | None) -> SamplingParams:
        """Add what depends on the prompt to the sampling parameters."""
        max_tokens = self._max_tokens(prompt_len)
        if grammar is None:
            return msgspec.structs.replace(self.params, max_tokens=max_tokens)
        if self.body.ignore_eos:
            raise InvalidRequest(
                "`ignore_eos` cannot be combined with structured outputs, which end with an end-of-sequence token.",
                "ignore_eos",
            )
        if self.beams is not None:
            raise InvalidRequest(
                "`use_beam_search` cannot be combined with structured outputs or required tool calls.",
                "use_beam_search",
            )
        return msgspec.structs.replace(
            self.params, max_tokens=max_tokens, grammar=grammar.text, grammar_size=grammar.size
        )


def plan_sequences(
    body: GenerationRequest,
    model: ServedModel,
    state: ServerState,
    *,
    visible_tokens: tuple[int, ...] = (),
    prompt_token_ids: PromptTokenIds | None = None,
) -> SequencePlan:
    """Check the fields of a request, and fill in the defaults of the model and the server, also in `body`.

    Args:
        body: the request.
        model: the model that answers it.
        state: the server.
        visible_tokens: special tokens that are kept in the text.
        prompt_token_ids: tokens to score in the prompt.

    Raises:
        InvalidRequest: a field is out of bounds.
    """
    _fill_in(body, model, state)
    limits, n = state.limits, sequences_per_prompt(body, state.limits)
    _check_limits(body, model, limits)
    params = SamplingParams(
        **msgspec.structs.asdict(numbers_of(body, model.defaults.numbers)),
        max_tokens=1,
        min_tokens=body.min_tokens,
        seed=body.seed,
        eos_token_ids=() if body.ignore_eos else model.eos_token_ids,
        stop_token_ids=_stop_token_ids(body.stop_token_ids, model),
        logit_bias=_logit_bias(body.logit_bias or {}, model),
        allowed_tokens=_allowed_tokens(body.allowed_token_ids, model),
        bad_words=_bad_words(body.bad_words or (), model),
        logprobs=body.alternatives,
        logprob_token_ids=_logprob_token_ids(body.logprob_token_ids, body.alternatives, model),
        prompt_logprobs=body.prompt_alternatives if prompt_token_ids is None else 0,
        prompt_token_ids=prompt_token_ids,
    )
    _check_choice(params, model.info.vocab_size)
    text = _text_params(body, limits, visible_tokens)
    beams, transfer = beam_options(body, params, model, n), transfer_plan(body, model, n)
    return SequencePlan(body, model, limits, n, params, text, beams, transfer)


def numbers_of(body: NumberFields, defaults: SamplingNumbers) -> SamplingNumbers:
    """Return the numbers of a request, with defaults in place of those that it leaves out."""
    requested = {name: value for name in NUMBERS if (value := getattr(body, name)) is not None}
    numbers = msgspec.structs.replace(defaults, **requested)
    return msgspec.structs.replace(
        numbers,
        temperature=0.0 if numbers.temperature < _GREEDY_THRESHOLD else max(_MIN_TEMPERATURE, numbers.temperature),
        top_p=max(_MIN_TOP_P, numbers.top_p),
        top_k=max(0, numbers.top_k),
    )


def sequences_per_prompt(body: GenerationRequest, limits: LimitOptions) -> int:
    """Return the number of answers to each prompt.

    Raises:
        InvalidRequest: there are too many.
    """
    n = body.n or 1
    if n > limits.max_n:
        raise InvalidRequest(f"`n` may be at most {limits.max_n}, not {n}.", "n")
    return n


def _fill_in(body: GenerationRequest, model: ServedModel, state: ServerState) -> None:
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
    if state.include_metrics and body.return_metrics is None:
        body.return_metrics = body.streams_usage or not body.stream


def _advice(length: int, most: int | None, limit: int) -> str:
    """What helps a request with too many tokens."""
    if most is None or length >= limit:
        return "reduce the length of the input"
    advice = "request fewer output tokens"
    return advice if most >= limit else f"reduce the length of the input, or {advice}"


def _check_limits(body: GenerationRequest, model: ServedModel, limits: LimitOptions) -> None:
    logprobs_field = "top_logprobs" if getattr(body, "top_logprobs", None) else "logprobs"
    reported = (logprobs_field, "sample", body.alternatives), ("prompt_logprobs", "prompt", body.prompt_alternatives)
    for name, kind, value in reported:
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
    if body.priority and not model.priority_scheduling:
        raise InvalidRequest("`priority` requires a server with --scheduling-policy priority.", "priority")
    keep, limit = body.truncate_prompt_tokens, model.info.max_model_len
    if keep is not None and keep > limit:
        raise InvalidRequest(
            f"`truncate_prompt_tokens` must be at most the context length of {limit} tokens, not {keep}. "
            "Please request a smaller truncation size.",
            "truncate_prompt_tokens",
        )


def _text_params(body: GenerationRequest, limits: LimitOptions, visible_tokens: tuple[int, ...]) -> TextParams:
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
    spellings: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not tokens or max(tokens) >= size:
                raise InvalidRequest(
                    f"`bad_words`: {word!r} cannot be tokenized with this model's vocabulary.", "bad_words"
                )
            spellings[tokens] = None
    total = sum(map(len, spellings))
    if total > _MAX_BAD_WORD_TOKENS:
        raise InvalidRequest(
            f"`bad_words` may have at most {_MAX_BAD_WORD_TOKENS} tokens in total, where each word counts twice, "
            f"without and with a space in front of it; these have {total}.",
            "bad_words",
        )
    return tuple(spellings)


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
