"""Fields and models that several endpoints share."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

Item = TypeVar("Item")
# Validation stops at the first invalid item: errors for a million items would block the event loop for half a minute.
ListOf = Annotated[list[Item], Field(fail_fast=True)]
Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
FinishReason = Literal["stop", "length", "abort", "error", "tool_calls"]


def too_many_keys(maximum: int, count: int) -> PydanticCustomError:
    """A validation error of a dict with too many keys."""
    return PydanticCustomError(
        "too_many_keys",
        "Object should have at most {maximum} keys, not {given}",
        {"maximum": maximum, "given": count},
    )


def max_keys(maximum: int) -> BeforeValidator:
    """Bounds the length of a dict. `Field(max_length=...)` alone collects the errors of all its entries first."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > maximum:
            raise too_many_keys(maximum, len(value))
        return value

    return BeforeValidator(check)


# Bounds that keep validation on the event loop short, and that no client needs to exceed.
_MAX_MESSAGES = 4096
_MAX_PARTS = 1 << 14
TemplateVariables = Annotated[dict[str, Any], Field(max_length=256), max_keys(256)]
MediaSettings = Annotated[dict[str, Any], Field(max_length=64), max_keys(64)]


def _check_conversation(messages: Any) -> Any:
    """Bounds the number of messages, and of content parts and tool calls in all of them."""
    if not isinstance(messages, list):
        return messages
    if len(messages) > _MAX_MESSAGES:
        raise PydanticCustomError(
            "too_many_messages",
            "List should have at most {maximum} messages, not {given}",
            {"maximum": _MAX_MESSAGES, "given": len(messages)},
        )
    parts = sum(
        len(listed)
        for message in messages
        if isinstance(message, dict)
        for name in ("content", "tool_calls")
        if isinstance(listed := message.get(name), list)
    )
    if parts > _MAX_PARTS:
        raise PydanticCustomError(
            "too_many_parts",
            "Messages should have at most {maximum} content parts and tool calls together, not {given}",
            {"maximum": _MAX_PARTS, "given": parts},
        )
    return messages


# Of the messages of a conversation.
MessagesOf = Annotated[
    list[Item], Field(fail_fast=True, min_length=1, max_length=_MAX_MESSAGES), BeforeValidator(_check_conversation)
]


def field_error(param: str, message: str) -> PydanticCustomError:
    """A validation error that names the field."""
    return PydanticCustomError("invalid_field", "{message}", {"param": param, "message": message})


class _BoundedModel(BaseModel):
    """An object with a bounded number of undeclared fields, checked before each of them costs something."""

    max_undeclared: ClassVar[int]

    @model_validator(mode="before")
    @classmethod
    def _bound_keys(cls, value: Any) -> Any:
        maximum = len(cls.model_fields) + cls.max_undeclared
        if isinstance(value, dict) and len(value) > maximum:
            raise too_many_keys(maximum, len(value))
        return value


class StrictModel(_BoundedModel):
    """An object without undeclared fields. More than `max_undeclared` are refused with one error."""

    model_config = ConfigDict(extra="forbid")
    max_undeclared = 16


class RequestPart(_BoundedModel):
    """An object inside of a request body. Undeclared fields are kept, to be named by `quire.protocol.fields`.

    Attributes:
        passes_undeclared: they are passed to the chat template, and so may have an effect.
    """

    model_config = ConfigDict(extra="allow")
    max_undeclared = 256
    passes_undeclared: ClassVar[bool] = False

    def undeclared_inside(self) -> Iterator[tuple[str, Any]]:
        """Paths and values of unknown fields in parts that have no model of their own."""
        yield from ()


class RequestBody(_BoundedModel):
    """A request body. Undeclared fields are kept, to be checked by `quire.protocol.fields`.

    Attributes:
        constraints: the fields that constrain the answer; None if the endpoint has none.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    max_undeclared = 1024
    constraints: ClassVar[str | None] = None

    model: str | None = Field(
        None, description="name of a served model; default: the first one that has the endpoint's task"
    )


class PromptTokensDetails(BaseModel):
    """Prompt tokens by origin: audio as OpenAI has it, all media as vLLM has them. Without media there is neither."""

    cached_tokens: int
    audio_tokens: int | None = None
    multimodal_tokens: dict[Literal["audio", "image", "video"], int] | None = None

    @model_serializer(mode="wrap")
    def _omit_absent_fields(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return {name: value for name, value in fields.items() if value is not None}


class CompletionTokensDetails(BaseModel):
    """Completion tokens by purpose."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class RequestMetrics(BaseModel):
    """Timings of a request. Of several sequences, the earliest start and the latest end are used.

    The first one is from its arrival until the engine has it, the next three follow each other, as in Server-Timing.
    """

    preprocess_time_ms: float
    queue_time_ms: float
    prefill_time_ms: float
    generation_time_ms: float
    time_to_first_token_ms: float = Field(description="from the arrival of the request")
    mean_itl_ms: float | None
    tokens_per_second: float


class PromptLogprob(BaseModel):
    """A candidate token at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


def preencoded(documented: Any) -> GetPydanticSchema:
    """A field of a response that is written into its JSON without validation; `documented`: its type in OpenAPI."""

    def schema(_source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            lambda value, _validate: value,
            handler.generate_schema(documented),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value),
        )

    return GetPydanticSchema(schema)


PromptLogprobs = Annotated[orjson.Fragment, preencoded(list[dict[str, PromptLogprob] | None])]


class ErrorDetail(BaseModel):
    """Details of an error."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """Body of every error response."""

    error: ErrorDetail


# `ErrorBody` by reference: FastAPI makes a validator of each `model`, and 350 of them delayed every start. Routes that
# give it as their model, as /health does, define it in the document.
_ERROR = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorBody.__name__}"}}}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"content": _ERROR, "description": text}
    for status, text in (
        (400, "the request is not valid"),
        (401, "the API key is missing or wrong"),
        (404, "there is no such model or response"),
        (408, "generation exceeded its time limit"),
        (413, "the body is larger than --max-body-size"),
        (429, "this client has its share of the server (--max-client-share)"),
        (500, "internal server error"),
        (503, "the queue is full, or the engine has stopped"),
    )
}


# One event; OpenAPI 3.1 has no way to say that a body is a sequence of them.
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


def openapi_stream(model: type[BaseModel] | UnionType) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses of an endpoint that gives either a JSON body or a stream of events."""
    return {200: {"model": model, "content": {"text/event-stream": {"schema": _EVENT}}}, **ERRORS}
