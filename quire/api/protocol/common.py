"""Fields and models that several endpoints share."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Item = TypeVar("Item")
# Validation stops at the first invalid item: errors for a million items would block the event loop for half a minute.
ListOf = Annotated[list[Item], Field(fail_fast=True)]
Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
# Bounds that no use needs to exceed, and at which float32 logits cannot overflow.
Temperature = Annotated[float, Field(ge=0, le=1000)]
RepetitionPenalty = Annotated[float, Field(ge=0.001, le=1000)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=1 << 31)]
MinP = Annotated[float, Field(ge=0, le=1)]
FinishReason = Literal["stop", "length", "abort", "error", "tool_calls"]


def _check_bias_count(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > _MAX_BIASES:
        raise ValueError(f"at most {_MAX_BIASES} tokens may have a bias, not {len(value)}")
    return value


_MAX_BIASES = 1024
LogitBias = Annotated[dict[str, float], BeforeValidator(_check_bias_count), Field(max_length=_MAX_BIASES)]


def field_error(param: str, message: str) -> PydanticCustomError:
    """A validation error that names the field."""
    return PydanticCustomError("invalid_field", "{message}", {"param": param, "message": message})


class RequestBody(BaseModel):
    """A request body. Undeclared fields are kept, to be checked by `quire.api.http.fields`."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = Field(None, description="name of a served model; default: the first one")


class StreamOptions(BaseModel):
    """What a stream contains besides its text."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool = Field(False, description="end with a chunk that has the token counts")
    continuous_usage_stats: bool = Field(False, description="have the token counts in every chunk; with include_usage")


class CommonSamplingFields(RequestBody):
    """Sampling fields that have the same meaning at every endpoint that generates."""

    stream: bool | None = Field(False, description="answer with server-sent events")
    seed: Int64 | None = Field(None, description="requests with the same seed get the same answer")
    stop: str | ListOf[str] | None = Field(None, description="strings that end the answer")
    temperature: Temperature | None = None
    top_p: TopP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop_token_ids: ListOf[TokenId] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    skip_special_tokens: bool = True
    allowed_token_ids: ListOf[TokenId] | None = None
    bad_words: ListOf[Annotated[str, Field(max_length=256)]] | None = None
    priority: Int64 = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    timeout: Annotated[float, Field(ge=0.001, le=1e7)] | None = Field(
        None,
        description="seconds after which generation is aborted with status 408; the server may have a shorter limit",
    )


class ChatAndCompletionFields(CommonSamplingFields):
    """Fields that have the same meaning in completions and chat."""

    n: Annotated[int, Field(ge=1)] | None = Field(1, description="answers for each prompt")
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
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
    def _streaming(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "Stream options can only be defined when `stream=True`.")
        if self.prompt_logprobs is not None and self.stream:
            raise field_error("prompt_logprobs", "`prompt_logprobs` are not available when `stream=True`.")
        return self


class PromptTokensDetails(BaseModel):
    """Prompt tokens by origin."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Completion tokens by purpose."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class RequestMetrics(BaseModel):
    """Timings of a request. Of several sequences, the earliest start and the latest end are used."""

    queue_time_ms: float
    time_to_first_token_ms: float
    generation_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float


class PromptLogprob(BaseModel):
    """A candidate token at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ErrorDetail(BaseModel):
    """Details of an error."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """Body of every error response."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in (
        (400, "the request is not valid"),
        (401, "the API key is missing or wrong"),
        (404, "there is no such model or response"),
        (408, "generation exceeded its time limit"),
        (413, "the body is larger than --max-body-size"),
        (500, "internal server error"),
        (503, "the queue is full, or the engine has stopped"),
    )
}


def streamed(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses of an endpoint that gives either a JSON body or a stream of events."""
    return {200: {"model": model, "content": {"text/event-stream": {"schema": {"type": "string"}}}}, **ERRORS}
