"""The shapes of OpenAI's Responses API, and vLLM's extras."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from quire.api.protocol.common import ListOf, SampledFields
from quire.api.protocol.custom import ResponseCustomTool
from quire.api.protocol.mcp import ChosenMcpTool, McpCall, McpListTools, McpTool
from quire.api.protocol.structured import JsonObjectFormat, JsonSchema, StructuredOutputs, TextFormat

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


_Count = Annotated[int, Field(ge=1, lt=1 << 31)]


class Part(BaseModel):
    """A piece of a message's content. Its other fields depend on its type."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None


Content = str | ListOf[Part]


class Item(BaseModel):
    """What all items may have."""

    model_config = ConfigDict(extra="allow")

    id: str | None = None
    status: str | None = None


class InputMessage(Item):
    """A turn of the conversation, of the client's or of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCall(Item):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(Item):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class CustomToolCall(Item):
    """A call of a custom tool that the model made."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


class CustomToolCallOutput(Item):
    """What came of a custom tool's call."""

    type: Literal["custom_tool_call_output"]
    call_id: str
    output: Content


class ReasoningText(BaseModel):
    """A piece of reasoning."""

    type: str = "reasoning_text"
    text: str


class ReasoningItem(Item):
    """What the model thought before it answered."""

    type: Literal["reasoning"]
    summary: ListOf[ReasoningText] | None = None
    content: ListOf[ReasoningText] | None = None
    encrypted_content: str | None = None


def _kind(item: Any) -> str | None:
    given = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if given is None else str(given)


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


class ResponseTool(BaseModel):
    """A tool that the model may use: a function, or one that other servers run themselves."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(min_length=1)]
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def _tool_kind(tool: Any) -> str:
    kind = _kind(tool)
    return kind if kind in ("mcp", "custom") else "other"


AnyTool = Annotated[
    Annotated[McpTool, Tag("mcp")]
    | Annotated[ResponseCustomTool, Tag("custom")]
    | Annotated[ResponseTool, Tag("other")],
    Discriminator(_tool_kind),
]


class ChosenTool(BaseModel):
    """The function or custom tool that has to be called."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function", "custom"]
    name: str


class AllowedResponseTools(BaseModel):
    """The tools that may be called, or of which one has to be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[ListOf[ChosenTool | ChosenMcpTool], Field(min_length=1)]


class NamedFormat(BaseModel):
    """JSON of a schema."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    content: JsonSchema = Field(alias="schema")
    strict: bool | None = None


ResponseTextFormat = Annotated[TextFormat | JsonObjectFormat | NamedFormat, Field(discriminator="type")]


class TextConfig(BaseModel):
    """The form of the answer's text."""

    model_config = ConfigDict(extra="allow")

    format: ResponseTextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(BaseModel):
    """How the model is to think."""

    model_config = ConfigDict(extra="allow")

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


class ResponseStreamOptions(BaseModel):
    """What a stream tells besides its events."""

    model_config = ConfigDict(extra="allow")

    include_obfuscation: bool | None = Field(None, description="without effect: nothing is added to events")


class ResponsesRequest(SampledFields):
    """Answer a conversation that the server may remember."""

    input: str | ListOf[InputItem]
    instructions: str | None = Field(None, description="system message before all else; of this request alone")
    previous_response_id: str | None = Field(None, description="go on with a stored response's conversation")
    store: bool | None = Field(True, description="keep the response, to be retrieved or gone on with")
    background: bool | None = Field(False, description="answer at once and generate meanwhile; needs store")
    stream_options: ResponseStreamOptions | None = None
    prompt: None = Field(None, description="not supported: there are no stored prompts")
    include: ListOf[Included] | None = None
    max_output_tokens: _Count | None = None
    max_tool_calls: _Count | None = Field(None, description="of tools of MCP servers, in the whole response")
    metadata: Metadata | None = None
    parallel_tool_calls: bool | None = True
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    tools: ListOf[AnyTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | ChosenMcpTool | AllowedResponseTools | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    user: str | None = None

    include_reasoning: bool = True
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def is_stored(self) -> bool:
        """Whether the response will be stored."""
        return self.store is not False


class InputTokensDetails(BaseModel):
    """Where input tokens came from."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """What output tokens were for."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """Tokens that a response took."""

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


Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseObject(BaseModel):
    """A response, whole or on its way."""

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
    user: str | None = None


class DeletedResponse(BaseModel):
    """Confirms that a response was deleted."""

    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: bool = True


class InputItems(BaseModel):
    """A page of what a response answered."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
