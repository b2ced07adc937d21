"""Translates requests of the Responses API into chat requests."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from quire.api.http.body import request_of
from quire.api.http.errors import InvalidRequest
from quire.api.protocol.chat import ChatRequest
from quire.api.protocol.common import CommonSamplingFields
from quire.api.protocol.custom import FlatGrammarFormat, ResponseCustomTool
from quire.api.protocol.responses import (
    AllowedResponseTools,
    AnyTool,
    ChosenTool,
    Content,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputItem,
    InputMessage,
    NamedFormat,
    Part,
    ReasoningItem,
    ResponsesRequest,
    ResponseTool,
)
from quire.api.responses.mcp_tools import as_function_calls

_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[InputItem])
_SAME_FIELDS = (*CommonSamplingFields.model_fields, "structured_outputs", "parallel_tool_calls", "chat_template_kwargs")
_MAX_REASONING_BYTES = 1 << 22  # in the `encrypted_content` of one request, decoded


def input_items(body: ResponsesRequest) -> list[Any]:
    """The input as items. An empty text that continues a conversation adds nothing to it."""
    if body.input == "" and body.previous_response_id is not None:
        return []
    if isinstance(body.input, str):
        return [InputMessage(role="user", content=[Part(type="input_text", text=body.input)])]
    return list(body.input)


def stored_items(items: Sequence[dict[str, Any]]) -> list[Any]:
    """Items from their stored JSON."""
    return _ITEMS.validate_python(items)


def model_tools(tools: Iterable[AnyTool] | None) -> list[ResponseTool | ResponseCustomTool]:
    """The functions and custom tools among the tools, which are passed to the model."""
    return [
        tool
        for tool in tools or ()
        if isinstance(tool, ResponseTool | ResponseCustomTool) and tool.type in ("function", "custom")
    ]


def to_chat_request(body: ResponsesRequest, items: Sequence[Any]) -> ChatRequest:
    """The chat request that answers these items. MCP tools have been replaced by functions.

    Raises:
        InvalidRequest: a field is not valid.
    """
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME_FIELDS}
    fields |= {
        "messages": list(_messages(body.instructions, as_function_calls(items))),
        "max_completion_tokens": body.max_output_tokens,
        "tools": [_tool(tool) for tool in model_tools(body.tools)] or None,
        "tool_choice": _choice(body),
        "response_format": _format(body),
    }
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["chat_template_kwargs"] = {
            "reasoning_effort": body.reasoning.effort,
            **(body.chat_template_kwargs or {}),
        }
    if not fields["messages"]:
        raise InvalidRequest("`input` is empty; it needs at least one item or character.", "input")
    if fields["structured_outputs"] is not None:
        fields["structured_outputs"] = fields["structured_outputs"].model_dump(by_alias=True, exclude_unset=True)
    return request_of(ChatRequest, {name: value for name, value in fields.items() if value is not None})


def _tool(tool: ResponseTool | ResponseCustomTool) -> dict[str, Any]:
    if isinstance(tool, ResponseCustomTool):
        custom: dict[str, Any] = {"name": tool.name, "description": tool.description}
        if isinstance(tool.format, FlatGrammarFormat):
            grammar = {"syntax": tool.format.syntax, "definition": tool.format.definition}
            custom["format"] = {"type": "grammar", "grammar": grammar}
        return {"type": "custom", "custom": custom}
    if not tool.name:
        raise InvalidRequest("A tool of type `function` needs a `name`.", "tools")
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    if not model_tools(body.tools):
        if choice in (None, "none", "auto"):
            return None
        raise InvalidRequest("When using `tool_choice`, `tools` must contain functions or custom tools.", "tool_choice")
    match choice:
        case ChosenTool():
            return _named(choice)
        case AllowedResponseTools():
            allowed = {
                "mode": choice.mode,
                "tools": [_named(tool) for tool in choice.tools if isinstance(tool, ChosenTool)],
            }
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _named(tool: ChosenTool) -> dict[str, Any]:
    return {"type": tool.type, tool.type: {"name": tool.name}}


def _format(body: ResponsesRequest) -> dict[str, Any] | None:
    text = None if body.text is None else body.text.format
    if isinstance(text, NamedFormat):
        schema = {"name": text.name, "description": text.description, "schema": text.content, "strict": text.strict}
        return {"type": "json_schema", "json_schema": schema}
    return None if text is None else {"type": text.type}


def _messages(instructions: str | None, items: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Chat messages. Consecutive reasoning, text and calls of the assistant become one message.

    Instructions at the start become one system message: few templates know the role `developer`, and many accept only
    one system message, at the beginning.
    """
    items = list(items)
    first = next((index for index, item in enumerate(items) if not _is_instruction(item)), len(items))
    system = [] if not instructions else [instructions]
    system += [_text(item.content) for item in items[:first]]
    if system:
        yield {"role": "system", "content": "\n\n".join(system)}
    turn = _AssistantTurn()
    decoder = _ReasoningDecoder()
    for item in items[first:]:
        match item:
            case ReasoningItem():
                if turn.texts or turn.calls:
                    yield turn.message()
                    turn = _AssistantTurn()
                turn.reasoning.append(_reasoning(item, decoder))
            case FunctionCall() | CustomToolCall():
                turn.calls.append(_call(item))
            case InputMessage(role="assistant"):
                if turn.texts and not turn.calls:
                    yield turn.message()
                    turn = _AssistantTurn()
                turn.add_text(_text(item.content))
            case _:
                if not turn.is_empty:
                    yield turn.message()
                    turn = _AssistantTurn()
                yield _message(item)
    if not turn.is_empty:
        yield turn.message()


@dataclass(slots=True)
class _AssistantTurn:
    """Items that become one message of the assistant. `texts` has no empty ones."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    has_content: bool = False

    def add_text(self, text: str) -> None:
        """Add the text of a message."""
        self.has_content = True
        if text:
            self.texts.append(text)

    @property
    def is_empty(self) -> bool:
        """Whether it has no items."""
        return not (self.reasoning or self.has_content or self.calls)

    def message(self) -> dict[str, Any]:
        """The chat message."""
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(self.texts) if self.has_content else None}
        if self.reasoning:
            message["reasoning"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def _is_instruction(item: Any) -> bool:
    return isinstance(item, InputMessage) and item.role in ("system", "developer")


def _call(item: FunctionCall | CustomToolCall) -> dict[str, Any]:
    if isinstance(item, CustomToolCall):
        return {"id": item.call_id, "type": "custom", "custom": {"name": item.name, "input": item.input}}
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _message(item: InputMessage | FunctionCallOutput | CustomToolCallOutput) -> dict[str, Any]:
    if not isinstance(item, InputMessage):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
    role = "system" if item.role == "developer" else item.role
    return {"role": role, "content": _content(item.content)}


def _reasoning(item: ReasoningItem, decoder: _ReasoningDecoder) -> str:
    texts = [part.text for part in item.content or ()]
    if not texts and item.encrypted_content:
        texts = [decoder.decode(item.encrypted_content)]
    return "\n".join(texts or [part.text for part in item.summary or ()])


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    parts = [_part(part) for part in content]
    if any(part["type"] != "text" for part in parts):
        raise InvalidRequest("Only user messages may contain non-text content.", "input")
    return "".join(part["text"] for part in parts)


def _content(content: Content) -> str | list[dict[str, Any]]:
    """Content as text if it is only text, otherwise as content parts."""
    if isinstance(content, str):
        return content
    parts = [_part(part) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: Part) -> dict[str, Any]:
    if part.type in ("input_text", "output_text", "text", "summary_text") and part.text is not None:
        return {"type": "text", "text": part.text}
    if part.type == "refusal":
        return {"type": "text", "text": part.refusal or ""}
    if part.type == "input_image" and part.image_url is not None:
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    if part.type == "input_audio":
        return {"type": "input_audio", "input_audio": part.input_audio}
    raise InvalidRequest(f"Content of type `{part.type}` is not supported by this server.", "input")


# Reasoning that clients store and send back


def encode_reasoning(text: str) -> str:
    """Reasoning as `encrypted_content`: compressed and base64-encoded, not encrypted."""
    return base64.urlsafe_b64encode(zlib.compress(text.encode("utf-8", "replace"))).decode()


class _ReasoningDecoder:
    """Decodes the `encrypted_content` of one request, with a limit: it may be a thousand times as long decompressed."""

    def __init__(self) -> None:
        self._left = _MAX_REASONING_BYTES

    def decode(self, encrypted: str) -> str:
        """The text that `encode_reasoning` encoded.

        Raises:
            InvalidRequest: it was not made by this server, or the request contains too much of it.
        """
        try:
            unpacker = zlib.decompressobj()
            data = unpacker.decompress(base64.urlsafe_b64decode(encrypted), self._left)
            text = data.decode()
        except (binascii.Error, zlib.error, ValueError) as error:
            raise InvalidRequest("`encrypted_content` was not made by this server.", "input") from error
        self._left -= len(data)
        if self._left <= 0 or unpacker.unconsumed_tail:
            raise InvalidRequest(
                f"`encrypted_content` contains more than {_MAX_REASONING_BYTES} bytes of reasoning.", "input"
            )
        return text
