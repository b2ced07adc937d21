"""POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from quire.api.protocol.common import (
    FinishReason,
    GenerationFields,
    ListOf,
    PromptLogprobs,
    RequestMetrics,
    TokenId,
    Usage,
    field_error,
)
from quire.api.protocol.structured import StructuredFields


class CompletionRequest(GenerationFields, StructuredFields):
    """Continue one or more prompts, given as text or token ids."""

    prompt: str | ListOf[TokenId] | ListOf[ListOf[TokenId]] | ListOf[str]
    echo: bool | None = Field(False, description="begin the answer with the prompt")
    logprobs: Annotated[int, Field(ge=0)] | None = Field(None, description="alternatives to report at each token")
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    suffix: str | None = Field(None, description="not supported: models here continue texts, they do not fill gaps")
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _nothing_to_do(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise field_error("max_tokens", "`max_tokens` must be at least 1, unless the prompt is echoed.")
        return self


class CompletionLogprobs(BaseModel):
    """Columns over the tokens of a choice."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    """One answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


class Completion(BaseModel):
    """The whole answer."""

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
