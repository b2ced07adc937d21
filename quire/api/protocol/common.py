"""What requests and responses of several endpoints share."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Item = TypeVar("Item")
# A list ends at its first bad item: errors for a million of them would take half a minute of the event loop.
ListOf = Annotated[list[Item], Field(fail_fast=True)]
Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
# Bounds far outside of use, and well inside of what float32 holds once logits are multiplied or divided by them.
Temperature = Annotated[float, Field(ge=0, le=1000)]
RepetitionPenalty = Annotated[float, Field(ge=0.001, le=1000)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=1 << 31)]
MinP = Annotated[float, Field(ge=0, le=1)]
FinishReason = Literal["stop", "length", "abort", "error", "tool_calls"]


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > _MAX_BIASES:
        raise ValueError(f"at most {_MAX_BIASES} tokens may have a bias, not {len(value)}")
    return value


_MAX_BIASES = 1024
LogitBias = Annotated[dict[str, float], BeforeValidator(_few), Field(max_length=_MAX_BIASES)]


def field_error(param: str, message: str) -> PydanticCustomError:
    """A validator's error that names the field to blame."""
    return PydanticCustomError("unfit", "{message}", {"param": param, "message": message})


class RequestBody(BaseModel):
    """A request. Fields that are not declared are kept aside and judged by `quire.api.http.fields`."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = Field(None, description="name of a served model; the first one if not given")


class StreamOptions(BaseModel):
    """What a stream tells besides its text."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool = Field(False, description="end with a chunk that counts the tokens")
    continuous_usage_stats: bool = Field(False, description="count the tokens in every chunk; with include_usage")


class SampledFields(RequestBody):
    """How one answer is to come about; the same at every endpoint that generates."""

    stream: bool | None = Field(False, description="answer with server-sent events")
    seed: Int64 | None = Field(None, description="same seed, same answer")
    stop: str | ListOf[str] | None = Field(None, description="texts that end the answer")
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
        None, description="seconds after which the answer is given up; the server may have a shorter limit"
    )


class GenerationFields(SampledFields):
    """Fields of completions and chat that mean the same in both."""

    n: Annotated[int, Field(ge=1)] | None = Field(1, description="answers for each prompt")
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    request_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    return_metrics: bool | None = Field(None, description="tell how long the answer waited and took")

    @model_validator(mode="after")
    def _streaming(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "Stream options can only be defined when `stream=True`.")
        if self.prompt_logprobs is not None and self.stream:
            raise field_error("prompt_logprobs", "`prompt_logprobs` are not available when `stream=True`.")
        return self


class PromptTokensDetails(BaseModel):
    """Where prompt tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """What completion tokens were for."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Tokens that a request took."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class RequestMetrics(BaseModel):
    """How long an answer waited and took; of several sequences the earliest and the latest count."""

    queue_time_ms: float
    time_to_first_token_ms: float
    generation_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float


class PromptLogprob(BaseModel):
    """One candidate at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """The envelope of every error."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in (
        (400, "the request cannot be answered as it stands"),
        (401, "no key, or a wrong one"),
        (404, "no such model"),
        (408, "the answer took longer than it may"),
        (413, "the body is too large"),
        (500, "it is our fault"),
        (503, "the server is busy, or its engine has ended"),
    )
}


def streamed(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """What an endpoint answers that gives either a whole or a stream of events."""
    return {200: {"model": model, "content": {"text/event-stream": {"schema": {"type": "string"}}}}, **ERRORS}
