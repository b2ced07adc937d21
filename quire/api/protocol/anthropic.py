"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire.api.protocol.common import ListOf, MessagesOf, RequestBody, StopString, TemplateVariables, TopP
from quire.api.protocol.custom import MAX_TOOLS
from quire.api.protocol.structured import JsonSchema

Probability = Annotated[float, Field(ge=0, le=1)]


class _Block(BaseModel):
    """A part of a request. Undeclared fields, such as cache_control, have no effect."""

    model_config = ConfigDict(extra="allow")


class TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: str


class ImageBlock(_Block):
    """An image."""

    type: Literal["image"]
    source: dict[str, Any]


class ThinkingBlock(_Block):
    """Reasoning of an earlier message."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(_Block):
    """Encrypted reasoning; ignored."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(_Block):
    """A tool call of an earlier message."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Block):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | ListOf[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class MessageTurn(BaseModel):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | ListOf[Block]


class ToolDefinition(_Block):
    """A tool that the model may use."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(BaseModel):
    """Whether a tool must be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Block):
    """Whether the model reasons, and whether the reasoning is shown."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, description="without effect")


class OutputFormat(BaseModel):
    """A JSON schema for the answer."""

    type: Literal["json_schema"]
    content: JsonSchema = Field(alias="schema")


class OutputConfig(_Block):
    """Constraints of the answer."""

    format: OutputFormat | None = None
    effort: str | None = Field(None, description="passed to chat templates that read `reasoning_effort`")


class Conversation(RequestBody):
    """Fields that both endpoints share."""

    messages: MessagesOf[MessageTurn]
    system: str | ListOf[TextBlock] | None = None
    tools: Annotated[ListOf[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateVariables | None = None


class MessagesRequest(Conversation):
    """Answer a conversation."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: ListOf[StopString] | None = None
    stream: bool | None = False
    temperature: Probability | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    output_config: OutputConfig | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None


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
