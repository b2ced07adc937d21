"""OpenAI's Responses API with vLLM's extensions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from quire.protocol.common import (
    ListOf,
    MediaSettings,
    RequestMetrics,
    RequestPart,
    TemplateVariables,
    field_error,
    max_keys,
)
from quire.protocol.custom import MAX_TOOLS, ResponseCustomTool
from quire.protocol.kv_transfer import KVTransferParams
from quire.protocol.mcp import ChosenMcpTool, McpCall, McpListTools, McpTool
from quire.protocol.parts import Part
from quire.protocol.sampling import CommonSamplingFields
from quire.protocol.structured import StructuredOutputs, TextOrJsonFormat, check_parameters

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
    max_keys(16),
]


MAX_ITEMS = 4000  # of a conversation, stored ones included; a chat may have that many messages
_Count = Annotated[int, Field(ge=1, lt=1 << 31)]


Content = str | ListOf[Part]


class Item(RequestPart):
    """Fields that all items share."""

    id: str | None = None
    status: str | None = None


class InputMessage(Item):
    """A message of the client or of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCall(Item):
    """A function call of the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(Item):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class CustomToolCall(Item):
    """A custom tool call of the model."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


class CustomToolCallOutput(Item):
    """The result of a custom tool call."""

    type: Literal["custom_tool_call_output"]
    call_id: str
    output: Content


class ReasoningText(RequestPart):
    """A piece of reasoning."""

    type: str = "reasoning_text"
    text: str


class ReasoningItem(Item):
    """The reasoning before an answer."""

    type: Literal["reasoning"]
    summary: ListOf[ReasoningText] | None = None
    content: ListOf[ReasoningText] | None = None
    encrypted_content: str | None = None


def _kind(item: Any) -> str | None:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else str(kind)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[CustomToolCall, Tag("custom_tool_call")]
    | Annotated[CustomToolCallOutput, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[McpListTools, Tag("mcp_list_tools")]
    | Annotated[McpCall, Tag("mcp_call")],
    Discriminator(_kind),
]


class ResponseTool(RequestPart):
    """A function that the model may call, or a built-in tool of OpenAI, which is not supported."""

    type: Annotated[str, Field(min_length=1)]
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    _check_parameters = model_validator(mode="before")(check_parameters)


def _tool_kind(tool: Any) -> str:
    kind = _kind(tool)
    return kind if kind in ("mcp", "custom") else "other"


AnyTool = Annotated[
    Annotated[McpTool, Tag("mcp")]
    | Annotated[ResponseCustomTool, Tag("custom")]
    | Annotated[ResponseTool, Tag("other")],
    Discriminator(_tool_kind),
]


class ChosenTool(RequestPart):
    """Requires a call of one function or custom tool."""

    type: Literal["function", "custom"]
    name: str


class AllowedResponseTools(RequestPart):
    """Restricts calls to some of the tools, or requires a call of one of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[ListOf[ChosenTool | ChosenMcpTool], Field(min_length=1, max_length=MAX_TOOLS)]


class TextConfig(RequestPart):
    """The format of the answer's text."""

    format: TextOrJsonFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(RequestPart):
    """Options of the reasoning."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponseStreamOptions(RequestPart):
    """Options of a stream."""

    include_obfuscation: bool | None = Field(None, description="without effect: events are never obfuscated")


class ResponsesRequest(CommonSamplingFields):
    """Answer a conversation, which may be stored."""

    constraints = "`text.format` or `structured_outputs`"

    input: str | Annotated[ListOf[InputItem], Field(max_length=MAX_ITEMS)]
    instructions: str | None = Field(None, description="system message before all others; applies to this request only")
    previous_response_id: str | None = Field(None, description="continue the conversation of a stored response")
    store: bool | None = Field(True, description="store the response, to retrieve or continue it later")
    background: bool | None = Field(False, description="return at once and generate in the background; needs store")
    stream_options: ResponseStreamOptions | None = None
    prompt: None = Field(None, description="not supported")
    include: ListOf[Included] | None = None
    max_output_tokens: _Count | None = None
    max_tool_calls: _Count | None = Field(None, description="maximum number of calls of MCP tools in the response")
    metadata: Metadata | None = None
    parallel_tool_calls: bool | None = True
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    tools: Annotated[ListOf[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | ChosenMcpTool | AllowedResponseTools | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    user: str | None = None
    return_metrics: bool | None = Field(None, description="return timings of the response in `metrics`")

    include_reasoning: bool = True
    enable_response_messages: bool = Field(False, description="return the prompts and answers as text and token ids")
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: TemplateVariables | None = None
    mm_processor_kwargs: MediaSettings | None = None
    media_io_kwargs: MediaSettings | None = None
    kv_transfer_params: KVTransferParams | None = Field(
        None, description="as in completions; neither in the background nor with tools of MCP servers"
    )

    @model_validator(mode="after")
    def _check_transfer(self) -> Self:
        if self.kv_transfer_params is not None and self.background:
            raise field_error("background", "`background` cannot be combined with `kv_transfer_params`.")
        if self.kv_transfer_params is not None and any(isinstance(tool, McpTool) for tool in self.tools or ()):
            raise field_error("tools", "tools of MCP servers cannot be combined with `kv_transfer_params`.")
        return self

    @property
    def is_stored(self) -> bool:
        """Whether the response will be stored."""
        return self.store is not False


class InputTokensDetails(BaseModel):
    """Input tokens by origin."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """Output tokens by purpose."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(BaseModel):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: str


class RawMessage(BaseModel):
    """A prompt or an answer of the model."""

    type: Literal["raw_message_tokens"] = "raw_message_tokens"
    message: str
    tokens: list[int]


Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseObject(BaseModel):
    """A response, finished or not."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: dict[str, Any]
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: str
    usage: ResponseUsage | None = None
    metrics: RequestMetrics | None = Field(None, description="only with `return_metrics`")
    user: str | None = None
    input_messages: list[RawMessage] | None = Field(None, description="only with `enable_response_messages`")
    output_messages: list[RawMessage] | None = Field(None, description="only with `enable_response_messages`")
    kv_transfer_params: dict[str, Any] | None = Field(None, description="only if the request asks for them")

    @model_serializer(mode="wrap")
    def _omit_optional(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        optional = ("input_messages", "output_messages", "metrics", "kv_transfer_params")
        return {name: value for name, value in fields.items() if value is not None or name not in optional}


class DeletedResponse(BaseModel):
    """Confirms that a response was deleted."""

    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: bool = True


class InputItems(BaseModel):
    """A page of input items of a response."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
