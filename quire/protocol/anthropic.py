"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from quire.protocol.common import (
    ListOf,
    MessagesOf,
    RequestBody,
    RequestMetrics,
    RequestPart,
    TemplateVariables,
    field_error,
)
from quire.protocol.custom import MAX_TOOLS
from quire.protocol.kv_transfer import KVTransferParams
from quire.protocol.sampling import StopString, TopP
from quire.protocol.structured import JsonSchemaFormat

Probability = Annotated[float, Field(ge=0, le=1)]
_ToolName = Annotated[str, Field(min_length=1, max_length=256)]


class TextBlock(RequestPart):
    """Text."""

    type: Literal["text"]
    text: str
    citations: Any = Field(None, description="of a text of an earlier answer; without effect")


class TextSource(RequestPart):
    """The text of a document."""

    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class FileSource(RequestPart):
    """A picture, a video or a document as a file."""

    type: Literal["base64", "url", "file"]
    media_type: str | None = Field(None, description="without effect: the content says what it is")
    data: str | None = None
    url: str | None = None
    file_id: str | None = Field(None, description="of type `file`: the id, from /v1/files")


class ImageBlock(RequestPart):
    """A picture."""

    type: Literal["image"]
    source: FileSource


class VideoBlock(RequestPart):
    """A video, which Anthropic's API does not have."""

    type: Literal["video"]
    source: FileSource


class ContentSource(RequestPart):
    """The content of a document in blocks."""

    type: Literal["content"]
    content: str | ListOf[Annotated[TextBlock | ImageBlock | VideoBlock, Field(discriminator="type")]]


class DocumentBlock(RequestPart):
    """A document: text, or a file of text or PDF."""

    type: Literal["document"]
    source: Annotated[TextSource | ContentSource | FileSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None
    citations: dict[str, Any] | None = None


class SearchResultBlock(RequestPart):
    """A result of a search by the client."""

    type: Literal["search_result"]
    source: str
    title: str
    content: ListOf[TextBlock]
    citations: dict[str, Any] | None = None


class ToolReference(RequestPart):
    """Offers a tool that was deferred, in the result of a client's search for tools."""

    type: Literal["tool_reference"]
    tool_name: str


class ThinkingBlock(RequestPart):
    """Reasoning of an earlier message."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="without effect")


class RedactedThinkingBlock(RequestPart):
    """Encrypted reasoning; ignored."""

    type: Literal["redacted_thinking"]
    data: str | None = None


class ToolUseBlock(RequestPart):
    """A tool call of an earlier message."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = Field(None, description="of a call of an earlier answer; without effect")


class ToolResultBlock(RequestPart):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        str
        | ListOf[
            Annotated[
                TextBlock | ImageBlock | VideoBlock | DocumentBlock | SearchResultBlock | ToolReference,
                Field(discriminator="type"),
            ]
        ]
        | None
    ) = None
    is_error: bool | None = Field(None, description="without effect: the content says what went wrong")


class ToolDefinition(RequestPart):
    """A tool that the model may use."""

    type: Literal["custom"] | None = None
    name: _ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool | None = Field(None, description="offer the tool only once a message refers to it")
    eager_input_streaming: bool | None = Field(None, description="without effect: inputs are always streamed")

    @model_validator(mode="before")
    @classmethod
    def _is_function(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "custom":
            name = str(value.get("name", kind))
            raise ValueError(
                f"The tool {name[:100]!r} has the type {kind[:100]!r}, which only Anthropic's own servers and models "
                "have; leave it out, or send a tool with an `input_schema`"
            )
        return value


class DefinedTool(RequestPart):
    """A new tool."""

    type: Literal["tool_definition"]
    definition: ToolDefinition


class NamedTool(RequestPart):
    """One of the tools that are known."""

    type: Literal["tool_reference"]
    name: str


class ToolAddition(RequestPart):
    """Offers a tool from this message on."""

    type: Literal["tool_addition"]
    tool: Annotated[DefinedTool | NamedTool, Field(discriminator="type")]


class ToolRemoval(RequestPart):
    """Withdraws a tool from this message on."""

    type: Literal["tool_removal"]
    tool: NamedTool


Block = Annotated[
    TextBlock
    | ImageBlock
    | VideoBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolAddition
    | ToolRemoval,
    Field(discriminator="type"),
]


class MessageTurn(RequestPart):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | ListOf[Block]


class ToolChoice(RequestPart):
    """Whether a tool must be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestPart):
    """Whether the model reasons, and whether the reasoning is shown."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, description="without effect")
    display: Literal["summarized", "omitted"] | None = Field(None, description="omitted: reasoning is not returned")


class OutputConfig(RequestPart):
    """Constraints of the answer."""

    format: JsonSchemaFormat | None = None
    effort: str | None = Field(None, description="passed to chat templates that read `reasoning_effort`")


class Conversation(RequestBody):
    """Fields that both endpoints share."""

    messages: MessagesOf[MessageTurn]
    system: str | ListOf[TextBlock] | None = None
    tools: Annotated[ListOf[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonSchemaFormat | None = Field(None, description="older name of output_config.format")
    context_management: dict[str, Any] | None = Field(None, description="without effect: messages are not edited")
    chat_template_kwargs: TemplateVariables | None = None

    @property
    def shows_reasoning(self) -> bool:
        """Whether reasoning is returned."""
        return self.thinking is not None and self.thinking.type != "disabled" and self.thinking.display != "omitted"

    @property
    def format(self) -> JsonSchemaFormat | None:
        """The format of the answer, from whichever field."""
        return self.output_format if self.output_config is None else self.output_config.format or self.output_format

    @property
    def without_effect(self) -> list[str]:
        """Names of declared fields that are set and have no effect."""
        return [] if self.context_management is None else ["context_management"]

    @model_validator(mode="after")
    def _one_format(self) -> Self:
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise field_error("output_format", "`output_format` is the older name of `output_config.format`; send one.")
        return self


class MessagesRequest(Conversation):
    """Answer a conversation."""

    constraints = "`output_config.format`"

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: ListOf[StopString] | None = None
    stream: bool | None = False
    temperature: Probability | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    kv_transfer_params: KVTransferParams | None = Field(None, description="as in completions")


_OMITTED = ("metrics", "kv_transfer_params")  # fields of an answer that are not there if they are null


class MessagesUsage(BaseModel):
    """Token counts of a request. Tokens from the prefix cache are not included in `input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class MessagesResponse(BaseModel):
    """The response body."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None = None
    usage: MessagesUsage
    metrics: RequestMetrics | None = Field(None, description="only with --enable-per-request-metrics")
    kv_transfer_params: dict[str, Any] | None = Field(None, description="only if the request asks for them")

    @model_serializer(mode="wrap")
    def _omit_empty(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return {name: value for name, value in fields.items() if value is not None or name not in _OMITTED}


class TokenCount(BaseModel):
    """The number of tokens of a prompt."""

    input_tokens: int


class AnthropicErrorDetail(BaseModel):
    """Details of an error."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """Body of every error response of Anthropic's API."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
