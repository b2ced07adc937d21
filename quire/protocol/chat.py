"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)
from typing_extensions import override

from quire.protocol.common import (
    FinishReason,
    ListOf,
    MediaSettings,
    MessagesOf,
    PromptLogprobs,
    RequestMetrics,
    RequestPart,
    TemplateVariables,
    Usage,
    field_error,
    preencoded,
)
from quire.protocol.custom import BY_KIND, MAX_TOOLS, CustomTool, CustomToolCall, NamedCustomTool
from quire.protocol.sampling import Alternatives, GenerationRequest
from quire.protocol.structured import StructuredFields, check_parameters

# Fields of content parts and of tool calls; those of objects in them as a mapping.
_Fields = Mapping[str, "_Fields | None"]
_SOURCE_FIELDS: _Fields = {"type": None, "media_type": None, "data": None, "url": None, "file_id": None}
_FILE_FIELDS: _Fields = {"file_data": None, "file_url": None, "file_id": None, "filename": None, "detail": None}
_IMAGE_FIELDS: _Fields = {
    "type": None,
    "image_url": {"url": None, "detail": None},
    "file_id": None,
    "detail": None,
    "uuid": None,
}
_VIDEO_FIELDS: _Fields = {"type": None, "video_url": {"url": None}, "file_id": None, "uuid": None}
_PART_FIELDS: Mapping[str, _Fields] = {
    "text": {"type": None, "text": None},
    "input_text": {"type": None, "text": None},
    "output_text": {"type": None, "text": None, "annotations": None, "logprobs": None},
    "refusal": {"type": None, "refusal": None},
    "thinking": {"type": None, "thinking": None, "signature": None},
    "input_audio": {"type": None, "input_audio": {"data": None, "format": None}, "uuid": None},
    "audio_url": {"type": None, "audio_url": {"url": None}, "uuid": None},
    "image_url": _IMAGE_FIELDS,
    "input_image": _IMAGE_FIELDS,
    "image_embeds": {"type": None, "image_embeds": None},
    "video_url": _VIDEO_FIELDS,
    "input_video": _VIDEO_FIELDS,
    "image": {"type": None, "source": _SOURCE_FIELDS, "uuid": None},
    "video": {"type": None, "source": _SOURCE_FIELDS, "uuid": None},
    "file": {"type": None, "file": _FILE_FIELDS},
    "input_file": {"type": None, **_FILE_FIELDS},
    "document": {"type": None, "source": _SOURCE_FIELDS, "title": None, "context": None, "citations": None},
}
# Parts that need no type: it is the name of their only field.
_NAMED_BY_FIELD = ("image_url", "audio_url", "video_url", "input_audio", "file")
_CALL_FIELDS: _Fields = {
    "id": None,
    "type": None,
    "function": {"name": None, "arguments": None},
    "custom": {"name": None, "input": None},
}


def part_type(part: Any) -> str:
    """The type of a content part; empty if it has none."""
    if not isinstance(part, dict):
        return ""
    kind = part.get("type")
    if kind is None and "text" not in part:
        kind = next((name for name in _NAMED_BY_FIELD if name in part), "")
    return kind if isinstance(kind, str) else ""


def _undeclared(value: Any, fields: _Fields, where: str) -> Iterator[tuple[str, Any]]:
    for name, inside in value.items() if isinstance(value, dict) else ():
        if name not in fields:
            yield f"{where}.{name}", inside
        elif known := fields[name]:
            yield from _undeclared(inside, known, f"{where}.{name}")


class Message(RequestPart):
    """A message of the conversation. Other fields are passed to the chat template unchanged."""

    passes_undeclared = True

    role: Annotated[str, Field(min_length=1)]
    content: str | ListOf[dict[str, Any] | str] | None = None
    name: str | None = None
    tool_calls: ListOf[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def passed_to_template(self) -> Iterator[tuple[str, Any]]:
        """Paths and values of undeclared fields, also of tool calls, which only the chat template may read."""
        yield from (self.model_extra or {}).items()
        for index, call in enumerate(self.tool_calls or ()):
            yield from _undeclared(call, _CALL_FIELDS, f"tool_calls[{index}]")

    def undeclared_inside(self) -> Iterator[tuple[str, Any]]:
        """Unknown fields of content parts."""
        for index, part in enumerate(self.content if isinstance(self.content, list) else ()):
            kind = part_type(part) or "text"
            if isinstance(part, dict) and kind in _PART_FIELDS:
                yield from _undeclared(part, _PART_FIELDS[kind], f"content[{index}]")


class FunctionDefinition(RequestPart):
    """A function that the model may call. Other fields are passed to the chat template unchanged."""

    passes_undeclared = True

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        None, description="constrain the arguments to their schema whenever the function is called"
    )

    _check_parameters = model_validator(mode="before")(check_parameters)


class FunctionTool(RequestPart):
    """A function as one of the tools. Other fields are passed to the chat template unchanged."""

    passes_undeclared = True

    type: Literal["function"] = "function"
    function: FunctionDefinition

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.function.name

    @model_validator(mode="before")
    @classmethod
    def _is_supported(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise ValueError(f"Tools of type {kind[:100]!r} are not supported; supported are 'function' and 'custom'")
        return value


Tool = Annotated[Annotated[FunctionTool, Tag("other")] | Annotated[CustomTool, Tag("custom")], BY_KIND]


class FunctionName(RequestPart):
    """Names a function."""

    name: str


class NamedTool(RequestPart):
    """Requires a call of one function."""

    type: Literal["function"] = "function"
    function: FunctionName

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.function.name


NamedAnyTool = Annotated[Annotated[NamedTool, Tag("other")] | Annotated[NamedCustomTool, Tag("custom")], BY_KIND]


class AllowedToolSet(RequestPart):
    """A subset of the tools."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[ListOf[NamedAnyTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(RequestPart):
    """Restricts calls to some of the tools, or requires a call of one of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolSet


ToolChoice = Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedTools


class ChatRequest(GenerationRequest, StructuredFields):
    """Answer a conversation."""

    constraints = "`response_format` or `structured_outputs`"

    messages: MessagesOf[Message]
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="older name of max_completion_tokens")
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Alternatives | None = None
    tools: Annotated[ListOf[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = Field(None, description="auto if there are tools, otherwise none")
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call in the answer")
    reasoning_effort: str | None = Field(None, description="passed to chat templates that read it")
    include_reasoning: bool = True
    echo: bool = Field(False, description="begin the answer with the last message, if it has the role of the answer")
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: ListOf[dict[str, Any]] | None = None
    chat_template: str | None = Field(None, description="needs --trust-request-chat-template")
    chat_template_kwargs: TemplateVariables | None = None
    mm_processor_kwargs: MediaSettings | None = None
    media_io_kwargs: MediaSettings | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self.add_generation_prompt = resolve_generation_prompt(
            requested=self.add_generation_prompt,
            explicit="add_generation_prompt" in self.model_fields_set,
            continues=self.continue_final_message,
        )
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "when using `top_logprobs`, `logprobs` must be set to true.")
        return self

    @property
    @override
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    @override
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def resolve_generation_prompt(*, requested: bool, explicit: bool, continues: bool) -> bool:
    """Whether the template adds a generation prompt: not by default if the final message is continued.

    Raises:
        PydanticCustomError: the request explicitly asks for both.
    """
    if not (continues and requested):
        return requested
    if explicit:
        raise field_error(
            "add_generation_prompt", "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        )
    return False


class ChatLogprob(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(ChatLogprob):
    """A token of the answer with its alternatives."""

    top_logprobs: list[ChatLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a choice's tokens."""

    content: Annotated[orjson.Fragment | list[dict[str, Any]], preencoded(list[ChatTokenLogprob])] | None


class CalledFunction(BaseModel):
    """A called function and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A function call in an answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(BaseModel):
    """The assistant's message. Reasoning is in both of its fields. Tool calls are left out if there are none.

    Fields of OpenAI's API that are always null are there for clients that read them without asking.
    """

    model_config = ConfigDict(extra="allow")

    role: str = "assistant"
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall | CustomToolCall] | None = None

    @model_serializer(mode="wrap")
    def _omit_absent_fields(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return {name: value for name, value in fields.items() if value is not None or name != "tool_calls"}


class ChatChoice(BaseModel):
    """One of the `n` answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | None


class ChatCompletion(BaseModel):
    """The response body."""

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
