"""Translates requests of the Responses API into chat requests."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from quire.api.chat.source_fields import SourcedMessage, SourceFields
from quire.api.http.body import request_of
from quire.api.responses.mcp_tools import as_function_calls
from quire.protocol.chat import ChatRequest
from quire.protocol.custom import FlatGrammarFormat, ResponseCustomTool
from quire.protocol.errors import InvalidRequest, shorten
from quire.protocol.fields import set_fields
from quire.protocol.parts import Part
from quire.protocol.responses import (
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
    ReasoningItem,
    ResponsesRequest,
    ResponseTool,
)
from quire.protocol.sampling import CommonSamplingFields

_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[InputItem])
_SAME_FIELDS = (
    *(*CommonSamplingFields.model_fields, "structured_outputs", "parallel_tool_calls", "chat_template_kwargs"),
    *("mm_processor_kwargs", "media_io_kwargs", "return_metrics"),
)
# Names of fields by their names in chat requests.
_SOURCES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_TEXTS = ("input_text", "output_text", "text", "summary_text")  # types of content
_MEDIA = ("input_audio", "input_image", "input_video", "video_url", "input_file")  # the same in chats
_ChatPart = tuple[dict[str, Any], str]  # a content part of a chat, and its path
_BETWEEN_INSTRUCTIONS = "\n\n"
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


def to_chat_request(body: ResponsesRequest, items: Sequence[Any]) -> tuple[ChatRequest, SourceFields]:
    """The chat request that answers these items, and what its fields were made from.

    MCP tools have been replaced by functions.

    Raises:
        InvalidRequest: a field is not valid.
    """
    messages = list(_messages(body.instructions, as_function_calls(items), _Paths(body)))
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME_FIELDS}
    fields |= {
        "messages": [message.fields for message in messages],
        "max_completion_tokens": body.max_output_tokens,
        "tools": [_tool(tool) for tool in model_tools(body.tools)] or None,
        "tool_choice": _choice(body),
        "response_format": _format(body),
        "kv_transfer_params": body.kv_transfer_params and body.kv_transfer_params.model_dump(exclude_unset=True),
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
    source = SourceFields(_SOURCES, messages)
    with source.errors():
        return request_of(ChatRequest, {name: value for name, value in fields.items() if value is not None}), source


class _Paths:
    """Paths of the items of a request, as in `input[2]`."""

    def __init__(self, body: ResponsesRequest) -> None:
        items = () if isinstance(body.input, str) else body.input  # a text may have 30 million characters
        self._paths = {id(item): f"input[{index}]" for index, item in enumerate(items)}
        self._other = "input" if body.previous_response_id is None else "previous_response_id"

    def of(self, item: Any) -> str:
        """The path of an item; of one that is not from the request itself, the field that it came with."""
        return self._paths.get(id(item), self._other)


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
    return None if text is None else text.model_dump(by_alias=True, exclude_unset=True)


def _messages(instructions: str | None, items: Iterable[Any], paths: _Paths) -> Iterator[SourcedMessage]:
    """Chat messages. Consecutive reasoning, text and calls of the assistant become one message.

    Instructions at the start become one system message: few templates know the role `developer`, and many accept only
    one system message, at the beginning.
    """
    items = list(items)
    first = next((index for index, item in enumerate(items) if not _is_instruction(item)), len(items))
    if instructions or first:
        source = "instructions" if instructions else paths.of(items[0])
        yield _system(instructions, [(item, paths.of(item)) for item in items[:first]], source)
    turn = _AssistantTurn()
    decoder = _ReasoningDecoder()
    for item in items[first:]:
        path = paths.of(item)
        match item:
            case ReasoningItem():
                if turn.texts or turn.calls:
                    yield turn.message()
                    turn = _AssistantTurn()
                turn.add_reasoning(_reasoning(item, decoder, path), path)
            case FunctionCall() | CustomToolCall():
                turn.add_call(_call(item), path)
            case InputMessage(role="assistant"):
                if turn.texts and not turn.calls:
                    yield turn.message()
                    turn = _AssistantTurn()
                turn.add_text(_text(item.content, path), path)
            case _:
                if not turn.is_empty:
                    yield turn.message()
                    turn = _AssistantTurn()
                yield _message(item, path)
    if not turn.is_empty:
        yield turn.message()


@dataclass(slots=True)
class _AssistantTurn:
    """Items that become one message of the assistant. `texts` has no empty ones."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    has_content: bool = False
    path: str = ""  # of the first item
    call_paths: list[str] = field(default_factory=list)

    def add_reasoning(self, text: str, path: str) -> None:
        """Add reasoning."""
        self.path = self.path or path
        self.reasoning.append(text)

    def add_call(self, call: dict[str, Any], path: str) -> None:
        """Add a call."""
        self.path = self.path or path
        self.calls.append(call)
        self.call_paths.append(path)

    def add_text(self, text: str, path: str) -> None:
        """Add the text of a message."""
        self.path = self.path or path
        self.has_content = True
        if text:
            self.texts.append(text)

    @property
    def is_empty(self) -> bool:
        """Whether it has no items."""
        return not (self.reasoning or self.has_content or self.calls)

    def message(self) -> SourcedMessage:
        """The chat message."""
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(self.texts) if self.has_content else None}
        if self.reasoning:
            message["reasoning"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return SourcedMessage(message, self.path, self.call_paths)


def _is_instruction(item: Any) -> bool:
    return isinstance(item, InputMessage) and item.role in ("system", "developer")


def _call(item: FunctionCall | CustomToolCall) -> dict[str, Any]:
    if isinstance(item, CustomToolCall):
        return {"id": item.call_id, "type": "custom", "custom": {"name": item.name, "input": item.input}}
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _system(instructions: str | None, items: Sequence[tuple[InputMessage, str]], source: str) -> SourcedMessage:
    """One system message of several, each with its path. `source`: its own path."""
    if not any(_has_media(item.content) for item, _ in items):
        texts = [instructions] if instructions else []
        texts += [_text(item.content, path) for item, path in items]
        return SourcedMessage({"role": "system", "content": _BETWEEN_INSTRUCTIONS.join(texts)}, source)
    groups = [[_text_part(instructions, source)]] if instructions else []
    groups += [_chat_parts(item.content, f"{path}.content") for item, path in items]
    return _with_parts({"role": "system"}, _joined(groups), source)


def _joined(groups: Sequence[Sequence[_ChatPart]]) -> list[_ChatPart]:
    """The parts of instructions, whose texts are joined as those of instructions without media are."""
    parts: list[_ChatPart] = []
    for number, group in enumerate(groups):
        between = [_text_part(_BETWEEN_INSTRUCTIONS, group[0][1])] if number and group else []
        for part, path in (*between, *group):
            if parts and part["type"] == parts[-1][0]["type"] == "text":
                parts[-1] = _text_part(parts[-1][0]["text"] + part["text"], parts[-1][1])
            else:
                parts.append((part, path))
    return parts


def _message(item: InputMessage | FunctionCallOutput | CustomToolCallOutput, path: str) -> SourcedMessage:
    if isinstance(item, InputMessage):
        fields: dict[str, Any] = {"role": "system" if item.role == "developer" else item.role}
        content, name = item.content, "content"
    else:
        fields = {"role": "tool", "tool_call_id": item.call_id}
        content, name = item.output, "output"
    if _has_media(content):
        return _with_parts(fields, _chat_parts(content, f"{path}.{name}"), path)
    return SourcedMessage({**fields, "content": "\n".join(_texts(content, path, name))}, path)


def _with_parts(fields: dict[str, Any], parts: Sequence[_ChatPart], path: str) -> SourcedMessage:
    content = [part for part, _ in parts]
    return SourcedMessage({**fields, "content": content}, path, parts=[part_path for _, part_path in parts])


def _reasoning(item: ReasoningItem, decoder: _ReasoningDecoder, path: str) -> str:
    texts = [part.text for part in item.content or ()]
    if not texts and item.encrypted_content:
        texts = [decoder.decode(item.encrypted_content, f"{path}.encrypted_content")]
    return "\n".join(texts or [part.text for part in item.summary or ()])


def _text(content: Content, path: str) -> str:
    return "".join(_texts(content, path))


def _texts(content: Content, path: str, field_name: str = "content") -> list[str]:
    """The texts of the parts of an item's content. `path`: of the item."""
    if isinstance(content, str):
        return [content]
    return [_part(part, f"{path}.{field_name}[{index}]") for index, part in enumerate(content)]


def _has_media(content: Content) -> bool:
    return not isinstance(content, str) and any(part.type in _MEDIA for part in content)


def _chat_parts(content: Content, path: str) -> list[_ChatPart]:
    """Content parts of a chat, for content with media. `path`: of the content."""
    if isinstance(content, str):
        return [_text_part(content, path)]
    paths = [f"{path}[{index}]" for index in range(len(content))]
    return [
        (set_fields(part), part_path) if part.type in _MEDIA else _text_part(_part(part, part_path), part_path)
        for part, part_path in zip(content, paths, strict=True)
    ]


def _text_part(text: str, path: str) -> _ChatPart:
    return {"type": "text", "text": text}, path


def _part(part: Part, path: str) -> str:
    if part.type == "refusal":
        return part.refusal or ""
    if part.type in _MEDIA:
        raise InvalidRequest(f"Content of type `{part.type}` is not supported in messages of the assistant.", path)
    if part.type not in _TEXTS:
        raise InvalidRequest(
            f"Content of type `{shorten(part.type)}` is not supported by this server; supported are "
            f"{', '.join(_TEXTS)}, refusal and, except in messages of the assistant, {', '.join(_MEDIA)}.",
            path,
        )
    if part.text is None:
        raise InvalidRequest(f"Content of type `{part.type}` needs a `text`.", path)
    return part.text


# Reasoning that clients store and send back


def encode_reasoning(text: str) -> str:
    """Reasoning as `encrypted_content`: compressed and base64-encoded, not encrypted."""
    return base64.urlsafe_b64encode(zlib.compress(text.encode("utf-8", "replace"))).decode()


class _ReasoningDecoder:
    """Decode the `encrypted_content` of one request, with a limit: it may be a thousand times as long decompressed."""

    def __init__(self) -> None:
        self._left = _MAX_REASONING_BYTES

    def decode(self, encrypted: str, path: str) -> str:
        """The text that `encode_reasoning` encoded.

        Raises:
            InvalidRequest: it was not made by this server, or the request contains too much of it.
        """
        try:
            unpacker = zlib.decompressobj()
            data = unpacker.decompress(base64.urlsafe_b64decode(encrypted), self._left)
            text = data.decode()
        except (binascii.Error, zlib.error, ValueError) as error:
            raise InvalidRequest("`encrypted_content` was not made by this server.", path) from error
        self._left -= len(data)
        if self._left <= 0 or unpacker.unconsumed_tail:
            raise InvalidRequest(
                f"`encrypted_content` contains more than {_MAX_REASONING_BYTES} bytes of reasoning.", path
            )
        return text
