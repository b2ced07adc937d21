"""GET /v1/models, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

from quire.protocol.chat import Message, Tool, resolve_generation_prompt
from quire.protocol.common import ListOf, MediaSettings, MessagesOf, RequestBody, TemplateVariables, field_error
from quire.protocol.custom import MAX_TOOLS
from quire.protocol.token_ids import TokenIds


class ModelCard(BaseModel):
    """A name of a served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "quire"
    root: str
    parent: str | None = None
    max_model_len: int
    tasks: list[str] = Field(description="generate, transcribe, or pooling tasks such as embed, classify and score")
    input_modalities: list[str] = Field(description="text, image, audio")


class ModelList(BaseModel):
    """The names of all served models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeRequest(RequestBody):
    """Tokenize a prompt, or a conversation that is rendered by the chat template."""

    prompt: str | None = None
    messages: MessagesOf[Message] | None = None
    add_special_tokens: bool | None = Field(None, description="default: true for prompts, false for conversations")
    return_token_strs: bool | None = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: TemplateVariables | None = None
    mm_processor_kwargs: MediaSettings | None = None
    media_io_kwargs: MediaSettings | None = None
    tools: Annotated[ListOf[Tool], Field(max_length=MAX_TOOLS)] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise field_error("prompt", "Exactly one of `prompt` and `messages` is required.")
        if self.messages is not None:
            self.add_generation_prompt = resolve_generation_prompt(
                requested=self.add_generation_prompt,
                explicit="add_generation_prompt" in self.model_fields_set,
                continues=self.continue_final_message,
            )
        return self


class TokenizeResponse(BaseModel):
    """Token ids, and the context length of the model."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    """Turn token ids back into text."""

    tokens: TokenIds


class DetokenizeResponse(BaseModel):
    """The text of the tokens."""

    prompt: str
