"""GET /v1/models, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from quire.api.protocol.chat import Message, Tool, resolve_generation_prompt
from quire.api.protocol.common import ListOf, RequestBody, TokenId, field_error


class ModelCard(BaseModel):
    """A name under which a model answers."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "quire"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(BaseModel):
    """All served names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeRequest(RequestBody):
    """Tokens of a prompt, or of a conversation as its template renders it."""

    prompt: str | None = None
    messages: Annotated[ListOf[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = Field(None, description="true for prompts, false for conversations if not given")
    return_token_strs: bool | None = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: ListOf[Tool] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise field_error("prompt", "Give either `prompt` or `messages`.")
        if self.messages is not None:
            self.add_generation_prompt = resolve_generation_prompt(
                wanted=self.add_generation_prompt,
                said="add_generation_prompt" in self.model_fields_set,
                continues=self.continue_final_message,
            )
        return self


class TokenizeResponse(BaseModel):
    """Token ids, and how many the model's context holds."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    """Token ids to turn back into text."""

    tokens: ListOf[TokenId]


class DetokenizeResponse(BaseModel):
    """Their text."""

    prompt: str
