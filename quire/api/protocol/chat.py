"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from quire.api.protocol.common import (
    FinishReason,
    GenerationFields,
    ListOf,
    PromptLogprobs,
    RequestMetrics,
    Usage,
    field_error,
)
from quire.api.protocol.custom import BY_KIND, CustomTool, CustomToolCall, NamedCustomTool
from quire.api.protocol.structured import StructuredFields


class Message(BaseModel):
    """A turn of the conversation. Fields beyond these reach the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1)]
    content: str | ListOf[dict[str, Any] | str] | None = None
    name: str | None = None
    tool_calls: ListOf[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="hold the arguments to their schema wherever this is called")


class FunctionTool(BaseModel):
    """The same among other tools."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: FunctionDefinition

    @property
    def name(self) -> str:
        """The function's."""
        return self.function.name


Tool = Annotated[Annotated[FunctionTool, Tag("other")] | Annotated[CustomTool, Tag("custom")], BY_KIND]


class FunctionName(BaseModel):
    """A function."""

    name: str


class NamedTool(BaseModel):
    """The function that has to be called."""

    type: Literal["function"] = "function"
    function: FunctionName

    @property
    def name(self) -> str:
        """The function's."""
        return self.function.name


NamedAnyTool = Annotated[Annotated[NamedTool, Tag("other")] | Annotated[NamedCustomTool, Tag("custom")], BY_KIND]


class AllowedToolSet(BaseModel):
    """Some of the tools."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[ListOf[NamedAnyTool], Field(min_length=1)]


class AllowedTools(BaseModel):
    """The tools that may be called, or of which one has to be."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolSet


ToolChoice = Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedTools


class ChatRequest(GenerationFields, StructuredFields):
    """Answer a conversation."""

    messages: Annotated[ListOf[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="older name of max_completion_tokens")
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: ListOf[Tool] | None = None
    tool_choice: ToolChoice | None = Field(None, description="auto if there are tools")
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call")
    reasoning_effort: str | None = Field(None, description="given to chat templates that read it")
    include_reasoning: bool = True
    echo: bool = Field(False, description="begin the answer with the last message, if the same role speaks on")
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: ListOf[dict[str, Any]] | None = None
    chat_template: str | None = Field(None, description="needs --trust-request-chat-template")
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self.add_generation_prompt = resolve_generation_prompt(
            wanted=self.add_generation_prompt,
            said="add_generation_prompt" in self.model_fields_set,
            continues=self.continue_final_message,
        )
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "when using `top_logprobs`, `logprobs` must be set to true.")
        return self


def resolve_generation_prompt(*, wanted: bool, said: bool, continues: bool) -> bool:
    """Whether the template is to begin a new turn: not if the last one is continued.

    Raises:
        PydanticCustomError: the request said that it wants both.
    """
    if not (continues and wanted):
        return wanted
    if said:
        raise field_error(
            "add_generation_prompt", "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        )
    return False


class ChatLogprob(BaseModel):
    """A token and how likely it was."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(ChatLogprob):
    """A token of the answer with its alternatives."""

    top_logprobs: list[ChatLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a choice's tokens."""

    content: list[ChatTokenLogprob] | None


class CalledFunction(BaseModel):
    """A function and its arguments, as JSON text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of a function that the model wants to be made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(BaseModel):
    """The assistant's turn; reasoning is there under both of its names, if there is any, and so are calls."""

    model_config = ConfigDict(extra="allow")

    role: str = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall | CustomToolCall] | None = None

    @model_serializer(mode="wrap")
    def _leave_out_what_is_absent(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialise(self)
        return {name: value for name, value in fields.items() if value is not None or name in ("content", "refusal")}


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | None


class ChatCompletion(BaseModel):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: str | None = None
    system_fingerprint: str | None
    usage: Usage
    metrics: RequestMetrics | None = None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None = None
