"""vLLM's and OpenAI's requests for embeddings, classification and scores. Mixins declare their common fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from quire.protocol.chat import Message
from quire.protocol.common import Int64, MediaSettings, MessagesOf, RequestBody, TemplateVariables, field_error
from quire.protocol.pooling.inputs import Inputs, Text, TextOrTexts, Texts

EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
EmbedDtype = Literal[
    "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "uint8", "binary", "ubinary"
]  # fmt: skip
Endianness = Literal["native", "big", "little"]
MaxTokens = Annotated[int, Field(ge=0, lt=1 << 31)]
Truncation = Annotated[int, Field(ge=-1, lt=1 << 31)]
_REMOVED = ("normalize", "activation", "softmax")
_TEXTS, _CHAT = "texts", "a chat"  # discriminator tags; errors leave them out, as they are not names of fields


class PoolingFields(RequestBody):
    """Fields of all pooling requests."""

    truncate_prompt_tokens: Truncation | None = Field(
        None,
        description="truncate longer inputs to this number of tokens; -1: to the context length; default: refuse them",
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="default: the tokenizer's side")
    padding: Literal["max_length", "do_not_pad"] | None = Field(
        None, description="pad shorter inputs to the maximum length; the padding is computed like other tokens"
    )
    priority: Int64 | None = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    request_id: str | None = None
    timeout: Annotated[float, Field(ge=0.001, le=1e7)] | None = Field(
        None,
        description="seconds after which the request is aborted with status 408; the server may have a shorter limit",
    )

    @model_validator(mode="after")
    def _some_tokens(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            raise field_error("truncate_prompt_tokens", "`truncate_prompt_tokens` must be -1, or at least 1.")
        return self

    @model_validator(mode="after")
    def _no_removed_names(self) -> Self:
        for name in _REMOVED:
            if name in (self.model_extra or {}):
                raise field_error(name, f"`{name}` was removed from vLLM's API; use `use_activation`.")
        return self


class TextInput(BaseModel):
    """Inputs as texts or token ids."""

    input: Inputs
    add_special_tokens: bool = True


class MediaFields(BaseModel):
    """How pictures are prepared."""

    mm_processor_kwargs: MediaSettings | None = None
    media_io_kwargs: MediaSettings | None = None


class ChatInput(MediaFields):
    """One input as a conversation, which the chat template renders."""

    messages: MessagesOf[Message]
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = Field(None, description="needs --trust-request-chat-template")
    chat_template_kwargs: TemplateVariables | None = None

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise field_error(
                "add_generation_prompt", "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
            )
        return self


class EncodingFields(BaseModel):
    """The encoding of arrays in the response."""

    encoding_format: EncodingFormat | None = "float"
    embed_dtype: EmbedDtype | None = "float32"
    endianness: Endianness | None = "native"

    @property
    def encoding(self) -> tuple[EmbedDtype, Endianness]:
        """Data type and byte order."""
        return self.embed_dtype or "float32", self.endianness or "native"


class ActivationFields(BaseModel):
    """Whether logits of labels and scores become probabilities."""

    use_activation: bool | None = Field(None, description="apply softmax or sigmoid; default: the model's setting")


class EmbedFields(BaseModel):
    """Options of embeddings."""

    dimensions: Annotated[int, Field(lt=1 << 31)] | None = Field(
        None, description="length of the embeddings, for models that support shorter embeddings (Matryoshka)"
    )
    use_activation: bool | None = Field(None, description="normalize to length 1; default: the model's setting")
    prompt_name: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="name of one of the model's prompts, which is prepended to each text"
    )
    input_type: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="query or document, or another name of a prompt; without effect if the model has none"
    )
    instruction: Annotated[str, Field(max_length=1 << 13)] | None = Field(
        None, description="replaces the instruction in the model's prompt"
    )

    @model_validator(mode="after")
    def _one_name(self) -> Self:
        if self.prompt_name is not None and self.input_type is not None:
            raise field_error("input_type", "`prompt_name` and `input_type` cannot be combined.")
        return self


class TaskField(BaseModel):
    """The task of /pooling."""

    task: Annotated[str, Field(max_length=1024)] | None = Field(None, description="default: the model's first one")


class EmbeddingTextRequest(TextInput, EmbedFields, EncodingFields, PoolingFields):
    """Embed texts."""


class EmbeddingChatRequest(ChatInput, EmbedFields, EncodingFields, PoolingFields):
    """Embed a conversation."""


class ClassifyTextRequest(TextInput, ActivationFields, PoolingFields):
    """Classify texts."""


class ClassifyChatRequest(ChatInput, ActivationFields, PoolingFields):
    """Classify a conversation."""


class PoolingTextRequest(TaskField, TextInput, EmbedFields, EncodingFields, PoolingFields):
    """Pool texts, by any task of the model."""


class PoolingChatRequest(TaskField, ChatInput, EmbedFields, EncodingFields, PoolingFields):
    """Pool a conversation, by any task of the model."""


def _kind(body: Any) -> str:
    return _CHAT if isinstance(body, dict) and "messages" in body and "input" not in body else _TEXTS


EmbeddingRequest = Annotated[
    Annotated[EmbeddingTextRequest, Tag(_TEXTS)] | Annotated[EmbeddingChatRequest, Tag(_CHAT)], Discriminator(_kind)
]
ClassifyRequest = Annotated[
    Annotated[ClassifyTextRequest, Tag(_TEXTS)] | Annotated[ClassifyChatRequest, Tag(_CHAT)], Discriminator(_kind)
]
PoolingRequest = Annotated[
    Annotated[PoolingTextRequest, Tag(_TEXTS)] | Annotated[PoolingChatRequest, Tag(_CHAT)], Discriminator(_kind)
]


class ScoringFields(ActivationFields, MediaFields, PoolingFields):
    """Fields of requests that compare queries and documents."""

    max_tokens_per_query: MaxTokens | None = Field(
        0, description="truncate longer texts to this number of tokens; 0: no truncation"
    )
    max_tokens_per_doc: MaxTokens | None = Field(
        0, description="truncate longer texts to this number of tokens; 0: no truncation"
    )
    instruction: Annotated[str, Field(max_length=1 << 13)] | None = Field(
        None, description="description of relevant documents, for models with an instruction in their prompts"
    )
    chat_template_kwargs: TemplateVariables | None = None


class ScoreRequest(ScoringFields):
    """Compare one text with one or many, or many with as many. Four pairs of names mean the same."""

    queries: TextOrTexts | None = None
    documents: TextOrTexts | None = None
    items: TextOrTexts | None = None
    data_1: TextOrTexts | None = None
    data_2: TextOrTexts | None = None
    text_1: TextOrTexts | None = None
    text_2: TextOrTexts | None = None

    @model_validator(mode="after")
    def _one_pair(self) -> Self:
        names = SCORE_FIELDS.keys() | {second for seconds in SCORE_FIELDS.values() for second in seconds}
        present = {name for name in names if getattr(self, name) is not None}
        pairs = [{first, second} for first, seconds in SCORE_FIELDS.items() for second in seconds]
        if present not in pairs:
            text = "Exactly one of the pairs `queries` and `documents`, `queries` and `items`, `data_1` and `data_2`, "
            raise field_error(min(present, default="queries"), f"{text}`text_1` and `text_2` is required.")
        return self


# Name of the field with the first texts, and possible names of the field with the second texts.
SCORE_FIELDS: dict[str, tuple[str, ...]] = {
    "queries": ("documents", "items"),
    "data_1": ("data_2",),
    "text_1": ("text_2",),
}


class RerankRequest(ScoringFields):
    """Order documents by their relevance to a query, in the format of Jina and Cohere."""

    query: Text
    documents: Texts
    top_n: Annotated[int, Field(ge=0)] | None = Field(0, description="number of results to return; 0: all")
    return_documents: bool | None = Field(True, description="return the texts")
