"""Sampling fields of requests, with the bounds that requests have.

An endpoint has the fields of the class that its request extends. A number is also declared in
`quire.engine.client.sampling_params`, with the default that has no effect. An API that has other defaults or bounds
declares such fields again: `generate` and `anthropic` in this package do.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sized
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from quire.engine.client.sampling_params import GREEDY
from quire.protocol.common import Int64, ListOf, RequestBody, RequestPart, field_error, max_keys
from quire.protocol.kv_transfer import KVTransferParams
from quire.protocol.token_ids import TokenIds

Penalty = Annotated[float, Field(ge=-2, le=2)]
# Bounds that no use needs to exceed, and at which float32 logits cannot overflow.
Temperature = Annotated[float, Field(ge=0, le=1000)]
RepetitionPenalty = Annotated[float, Field(ge=0.001, le=1000)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=1 << 31)]
MinP = Annotated[float, Field(ge=0, le=1)]
Alternatives = Annotated[int, Field(ge=-1, description="-1: the whole vocabulary")]
# Bounds that keep validation on the event loop short, and that no client needs to exceed.
StopString = Annotated[str, Field(max_length=1024)]
StopTokenIds = Annotated[TokenIds, Field(max_length=1024)]
LogitBias = Annotated[dict[str, float], Field(max_length=1024), max_keys(1024)]
ExtensionArguments = Annotated[
    dict[str, str | int | float | ListOf[str | int | float]], Field(max_length=256), max_keys(256)
]


class ModelDefaultFields(BaseModel):
    """Numbers whose defaults are the model's: those of generation_config.json and --override-generation-config."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None


class NumberFields(ModelDefaultFields):
    """All numbers, the fields of `SamplingNumbers`. Without a value, or a default of the model, they have no effect."""

    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class ConstraintFields(BaseModel):
    """Fields that forbid tokens, change their probabilities or end the answer at a text. Beam search refuses them."""

    stop: StopString | ListOf[StopString] | None = Field(None, description="strings that end the answer")
    logit_bias: LogitBias | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    allowed_token_ids: TokenIds | None = None
    bad_words: ListOf[Annotated[str, Field(max_length=256)]] | None = None


class CommonSamplingFields(NumberFields, ConstraintFields, RequestBody):
    """Sampling fields that have the same meaning at every endpoint that generates."""

    stream: bool | None = Field(False, description="answer with server-sent events")
    seed: Int64 | None = Field(None, description="requests with the same seed get the same answer")
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    priority: Int64 = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    vllm_xargs: ExtensionArguments | None = Field(
        None, description="arguments of custom extensions of vLLM; this server has no extensions, so none has an effect"
    )
    timeout: Annotated[float, Field(ge=0.001, le=1e7)] | None = Field(
        None,
        description="seconds after which generation is aborted with status 408; the server may have a shorter limit",
    )


class StreamOptions(RequestPart):
    """What a stream contains besides its text."""

    include_usage: bool = Field(False, description="end with a chunk that has the token counts")
    continuous_usage_stats: bool = Field(False, description="have the token counts in every chunk; with include_usage")


class ChatAndCompletionFields(CommonSamplingFields):
    """Fields that have the same meaning in completions and chat."""

    n: Annotated[int, Field(ge=1)] | None = Field(1, description="answers for each prompt")
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        None, description="keep this many tokens of the prompt; -1: as many as leave room for the answer"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="the side of the prompt that truncate_prompt_tokens cuts; default: left"
    )
    prompt_logprobs: Alternatives | None = None
    logprob_token_ids: TokenIds | None = Field(
        None, description="tokens whose log-probabilities are returned in place of the top tokens; needs `logprobs`"
    )
    request_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    return_metrics: bool | None = Field(None, description="return timings of the request in `metrics`")

    @property
    def streams_usage(self) -> bool:
        """Whether the last chunk of the stream has token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def streams_usage_continuously(self) -> bool:
        """Whether all chunks of the stream have token counts."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    @model_validator(mode="after")
    def _some_tokens(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            raise field_error("truncate_prompt_tokens", "`truncate_prompt_tokens` must be -1, or at least 1.")
        return self

    @model_validator(mode="after")
    def _streaming(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "Stream options can only be defined when `stream=True`.")
        if self.prompt_logprobs is not None and self.stream:
            raise field_error("prompt_logprobs", "`prompt_logprobs` are not available when `stream=True`.")
        return self


class GenerationRequest(ChatAndCompletionFields):
    """A request of completions or chats. With beam search, the `n` most likely of the answers found with `n` beams."""

    use_beam_search: bool = Field(False, description="search for the most likely answers, with `n` beams")
    kv_transfer_params: KVTransferParams | None = Field(
        None, description="prefill and decode in two servers, which --kv-transfer-config connects"
    )
    length_penalty: Annotated[float, Field(ge=-10, le=10)] = Field(
        1.0, description="answers are ranked by their log-probability divided by their length to this power"
    )

    @model_validator(mode="after")
    def _check_beams(self) -> Self:
        if self.use_beam_search and self.stream:
            raise field_error("use_beam_search", "`use_beam_search` is not available when `stream=True`.")
        if self.length_penalty != 1 and not self.use_beam_search:
            raise field_error("length_penalty", "`length_penalty` requires `use_beam_search`.")
        return self

    @property
    @abstractmethod
    def most_tokens(self) -> int | None:
        """The number of tokens that may be generated; None: as many as fit."""

    @property
    @abstractmethod
    def alternatives(self) -> int | None:
        """The number of top tokens whose log-probabilities are reported beside the sampled token; None: nothing is."""

    @property
    def prompt_alternatives(self) -> int | None:
        """The number of top tokens to report at the positions of the prompt; None: nothing is reported."""
        return self.prompt_logprobs


def is_empty(value: Any) -> bool:
    """Whether the value of a field that constrains has no effect."""
    return len(value) == 0 if isinstance(value, Sized) else not value


def differs_from_greedy(body: BaseModel, name: str) -> bool:
    """Whether a request has a number with another value than greedy decoding."""
    return getattr(body, name) not in (None, getattr(GREEDY, name))
