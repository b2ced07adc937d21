"""POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BaseModel, Field, model_validator
from typing_extensions import override

from quire.protocol.common import FinishReason, Item, PromptLogprobs, RequestMetrics, Usage, field_error, preencoded
from quire.protocol.sampling import Alternatives, GenerationRequest
from quire.protocol.structured import StructuredFields
from quire.protocol.token_ids import TokenIds

_Prompts = Annotated[list[Item], Field(fail_fast=True, max_length=1 << 14)]  # --max-prompts is usually less


class CompletionRequest(GenerationRequest, StructuredFields):
    """Continue one or more prompts, given as text or token ids."""

    constraints = "`response_format` or `structured_outputs`"

    # From left to right: texts are never taken for token ids.
    prompt: Annotated[str | _Prompts[str] | TokenIds | _Prompts[TokenIds], Field(union_mode="left_to_right")]
    echo: bool | None = Field(False, description="begin the answer with the prompt")
    logprobs: Alternatives | None = Field(
        None, description="number of alternatives at each token; -1: the whole vocabulary"
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    suffix: str | None = Field(None, description="not supported: there is no fill-in-the-middle")
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_max_tokens(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise field_error("max_tokens", "`max_tokens` must be at least 1, unless `echo` is true.")
        if self.max_tokens == 0 and self.logprob_token_ids is not None:
            raise field_error("logprob_token_ids", "`logprob_token_ids` needs `max_tokens` of at least 1.")
        return self

    @property
    @override
    def most_tokens(self) -> int | None:
        return 1 if self.max_tokens == 0 else self.max_tokens

    @property
    @override
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    @override
    def prompt_alternatives(self) -> int | None:
        if not self.echo or self.logprobs is None:
            return self.prompt_logprobs
        return max(self.logprobs, self.prompt_logprobs or 0)


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a choice, one entry per token in each list."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    """One of the answers."""

    index: int
    text: str
    logprobs: Annotated[orjson.Fragment, preencoded(CompletionLogprobs)] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: Annotated[orjson.Fragment, preencoded(list[int])] | None


class Completion(BaseModel):
    """The response body."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: str | None = None
    system_fingerprint: str | None
    usage: Usage
    metrics: RequestMetrics | None = None
    kv_transfer_params: dict[str, Any] | None = None
