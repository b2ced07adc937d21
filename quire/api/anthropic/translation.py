"""Translates requests of Anthropic's Messages API into chat requests, and answers into messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from quire.api.chat.source_fields import SourcedMessage, SourceFields
from quire.api.http.body import request_of
from quire.api.http.sse import typed_event
from quire.parsing.event_writer import EventWriter, TextKind
from quire.parsing.tools.calls import CallDelta, Parsed, Piece
from quire.protocol.anthropic import (
    ContentSource,
    Conversation,
    DefinedTool,
    DocumentBlock,
    FileSource,
    ImageBlock,
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    MessageTurn,
    NamedTool,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolAddition,
    ToolDefinition,
    ToolReference,
    ToolRemoval,
    ToolResultBlock,
    ToolUseBlock,
    VideoBlock,
)
from quire.protocol.chat import ChatRequest
from quire.protocol.common import RequestMetrics
from quire.protocol.errors import ApiError, InvalidRequest
from quire.protocol.strict_json import parse_json
from quire.rendering.prompts import EFFORT, THINKING_SWITCHES
from quire.serving.generation import UsageCounter


def offered_tools(body: Conversation) -> list[ToolDefinition]:
    """The tools without those that are deferred, or were withdrawn by a message.

    A deferred tool is offered once the result of a search refers to it or a message adds it.

    Raises:
        InvalidRequest: a message refers to a tool that is not known.
    """
    known = {tool.name: tool for tool in body.tools or ()}
    offered = {tool.name for tool in body.tools or () if not tool.defer_loading}
    defined = list(body.tools or ())
    for path, block in _changes(body):
        match block:
            case ToolAddition(tool=DefinedTool(definition=tool)):
                if tool.name not in known:
                    defined.append(tool)
                known[tool.name] = tool
                offered.add(tool.name)
            case ToolAddition(tool=NamedTool(name=name)):
                _check_known(name, known, f"{path}.tool.name")
                offered.add(name)
            case ToolRemoval(tool=NamedTool(name=name)):
                _check_known(name, known, f"{path}.tool.name")
                offered.discard(name)
            case ToolReference(tool_name=name):
                _check_known(name, known, f"{path}.tool_name")
                offered.add(name)
    return [known[tool.name] for tool in defined if tool.name in offered]


def _changes(body: Conversation) -> Iterator[tuple[str, ToolAddition | ToolRemoval | ToolReference]]:
    """The blocks that change what is offered, each with its path."""
    for index, turn in enumerate(body.messages):
        for number, block in enumerate(() if isinstance(turn.content, str) else turn.content):
            path = f"messages[{index}].content[{number}]"
            if isinstance(block, ToolAddition | ToolRemoval):
                yield path, block
            elif isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                for place, part in enumerate(block.content):
                    if isinstance(part, ToolReference):
                        yield f"{path}.content[{place}]", part


def _check_known(name: str, known: dict[str, ToolDefinition], path: str) -> None:
    if name not in known:
        raise InvalidRequest(f"The tool {name!r} is not one of the `tools`.", path)


_SOURCES = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences"}  # names by their names in chat requests
_Readable = TextBlock | ImageBlock | VideoBlock | DocumentBlock | SearchResultBlock | ToolReference
_Part = tuple[dict[str, Any], str]  # a content part of a chat, and its path
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def to_chat_request(body: Conversation) -> tuple[ChatRequest, SourceFields]:
    """The same request for chat completions, and what its fields were made from.

    Raises:
        InvalidRequest: a field is not valid.
    """
    messages = list(_messages(body))
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": [message.fields for message in messages],
        "include_reasoning": body.shows_reasoning,
        "chat_template_kwargs": _variables(body),
        **_tools(body),
    }
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_completion_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "cache_salt": body.cache_salt,
            "kv_transfer_params": body.kv_transfer_params and body.kv_transfer_params.model_dump(exclude_unset=True),
            "response_format": None if body.format is None else body.format.model_dump(by_alias=True),
        }
    format_field = "output_config.format" if body.output_format is None else "output_format"
    source = SourceFields({**_SOURCES, "response_format": format_field}, messages)
    with source.errors():
        return request_of(ChatRequest, {name: value for name, value in fields.items() if value is not None}), source


def _variables(body: Conversation) -> dict[str, Any] | None:
    variables = dict(body.chat_template_kwargs or {})
    if body.thinking is not None and not any(name in variables for name in THINKING_SWITCHES):
        variables |= dict.fromkeys(THINKING_SWITCHES, body.thinking.type != "disabled")
    config = body.output_config if isinstance(body, MessagesRequest) else None
    if config is not None and config.effort is not None:
        variables.setdefault(EFFORT, config.effort)
    return variables or None


def _tools(body: Conversation) -> dict[str, Any]:
    choice = body.tool_choice
    if choice is not None and choice.type == "tool" and choice.name is None:
        raise InvalidRequest("`tool_choice` of type `tool` needs the `name` of the tool.", "tool_choice")
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "parameters": tool.input_schema,
                **({} if tool.description is None else {"description": tool.description}),
                **({} if tool.strict is None else {"strict": tool.strict}),
            },
        }
        for tool in offered_tools(body)
    ]
    fields: dict[str, Any] = {"tools": None if body.tools is None else tools}
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
        if choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
    return fields


def _messages(body: Conversation) -> Iterator[SourcedMessage]:
    if body.system:
        texts = [body.system] if isinstance(body.system, str) else [block.text for block in body.system]
        yield SourcedMessage({"role": "system", "content": "\n".join(texts)}, "system")
    for index, turn in enumerate(body.messages):
        yield from _turn(turn, f"messages[{index}]")


def _turn(turn: MessageTurn, path: str) -> Iterator[SourcedMessage]:
    """The chat messages of a turn. Tool results become separate messages, before the others."""
    if isinstance(turn.content, str):
        yield SourcedMessage({"role": turn.role, "content": turn.content}, path)
        return
    parts: list[_Part] = []
    calls: list[dict[str, Any]] = []
    paths: list[str] = []  # of the calls
    reasoning: list[str] = []
    without_text = False
    for index, block in enumerate(turn.content):
        match block:
            case TextBlock() | ImageBlock() | VideoBlock() | DocumentBlock() | SearchResultBlock():
                parts += _parts(block, f"{path}.content[{index}]")
            case ThinkingBlock(thinking=thinking):
                reasoning += [thinking] if thinking else []
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
                paths.append(f"{path}.content[{index}]")
            case ToolResultBlock():
                without_text = True
                yield _result(block, f"{path}.content[{index}]")
            case ToolAddition() | ToolRemoval():  # see `offered_tools`
                without_text = True
            case RedactedThinkingBlock():
                pass
    if parts or calls or reasoning or not without_text:
        message: dict[str, Any] = {"role": turn.role, "content": [part for part, _ in parts] or None}
        if calls:
            message["tool_calls"] = calls
        if reasoning:
            message["reasoning"] = "\n".join(reasoning)
        yield SourcedMessage(message, path, paths, [part_path for _, part_path in parts])


def _result(block: ToolResultBlock, path: str) -> SourcedMessage:
    message = {"role": "tool", "tool_call_id": block.tool_use_id}
    if block.content is None or isinstance(block.content, str):
        return SourcedMessage({**message, "content": block.content or ""}, path)
    parts = [part for index, inner in enumerate(block.content) for part in _parts(inner, f"{path}.content[{index}]")]
    content = [part for part, _ in parts]
    return SourcedMessage({**message, "content": content}, path, parts=[part_path for _, part_path in parts])


def _parts(block: _Readable, path: str) -> Iterator[_Part]:
    """The content parts that a block becomes, each with its path."""
    match block:
        case ImageBlock() | VideoBlock():
            yield block.model_dump(exclude_none=True), path
        case DocumentBlock():
            yield from _document(block, path)
        case _:
            yield {"type": "text", "text": _text(block)}, path


def _document(block: DocumentBlock, path: str) -> Iterator[_Part]:
    """The content parts that a document becomes: a file, one text, or if it has pictures, one part for each block."""
    head = [text for text in (block.title, block.context) if text]
    match block.source:
        case FileSource():
            yield block.model_dump(exclude_none=True), path
            return
        case TextSource(data=text):
            texts = [text]
        case ContentSource(content=str() as text):
            texts = [text]
        case ContentSource(content=list() as blocks):
            texts = [inner.text for inner in blocks if isinstance(inner, TextBlock)]
            if len(texts) < len(blocks):
                if head:
                    yield {"type": "text", "text": "\n".join([*head, ""])}, path
                for index, inner in enumerate(blocks):
                    yield from _parts(inner, f"{path}.source.content[{index}]")
                return
    yield {"type": "text", "text": "\n".join([*head, *texts])}, path


def _text(block: TextBlock | SearchResultBlock | ToolReference) -> str:
    """Return what the model reads of a block."""
    match block:
        case TextBlock(text=text):
            return text
        case ToolReference(tool_name=name):
            return f"The tool {name} can be used now."
        case SearchResultBlock():
            return "\n".join([block.title, block.source, *(part.text for part in block.content)])


def stop_fields(finish_reason: str | None, stop_reason: int | str | None) -> tuple[str | None, str | None]:
    """`stop_reason` and `stop_sequence` of a message."""
    if isinstance(stop_reason, str):
        return "stop_sequence", stop_reason
    return _REASONS.get(finish_reason or "", "end_turn"), None


def messages_usage(counter: UsageCounter) -> MessagesUsage:
    """Token counts in Anthropic's format."""
    usage = counter.usage()
    cached = usage.prompt_tokens_details.cached_tokens
    return MessagesUsage(
        input_tokens=usage.prompt_tokens - cached,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=cached,
    )


def content_blocks(parsed: Parsed, *, thinking: bool) -> list[dict[str, Any]]:
    """The content of a complete answer."""
    shown = Parsed()
    for piece in parsed.pieces:
        if isinstance(piece, CallDelta):
            shown.add_call(piece)
        elif thinking or not piece.reasoning:
            shown.add_text(piece.text, reasoning=piece.reasoning, apart=piece.apart)
    return [_block(piece) for piece in shown.pieces]


def _block(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, CallDelta):
        return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": _input(piece.arguments)}
    if piece.reasoning:
        return {"type": "thinking", "thinking": piece.text, "signature": ""}
    return {"type": "text", "text": piece.text}


def _input(arguments: str) -> Any:
    """Arguments as an object; an empty one if they were cut off by `max_tokens` or are nested too deeply for JSON."""
    try:
        parsed = parse_json(arguments)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def encode_event(kind: str, body: Mapping[str, Any]) -> bytes:
    """An encoded event."""
    return typed_event({"type": kind, **body})


def error_event(error: ApiError) -> bytes:
    """The event of an error after the stream has begun."""
    return encode_event("error", {"error": error.anthropic_body()["error"]})


class MessageStreamWriter(EventWriter[bytes]):
    """Write the events of one streamed message: its content blocks one after the other."""

    def __init__(self, message: MessagesResponse, *, thinking: bool) -> None:
        """Make a writer.

        Args:
            message: without content.
            thinking: whether reasoning is shown.
        """
        super().__init__(reasoning=thinking)
        self._message = message
        self._index = -1  # of the last block

    def begin(self) -> bytes:
        """The first event."""
        return encode_event("message_start", {"message": self._message.model_dump()})

    def end(
        self,
        stop_reason: str | None,
        stop_sequence: str | None,
        usage: MessagesUsage,
        metrics: RequestMetrics | None = None,
    ) -> Iterator[bytes]:
        """The last events."""
        yield from self.close()
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        timings = {} if metrics is None else {"metrics": metrics.model_dump()}
        yield encode_event("message_delta", {"delta": delta, "usage": usage.model_dump(), **timings})
        yield encode_event("message_stop", {})

    def _text_opened(self, kind: TextKind) -> Iterator[bytes]:
        if kind == "reasoning":
            yield self._block_start({"type": "thinking", "thinking": "", "signature": ""})
        else:
            yield self._block_start({"type": "text", "text": ""})

    def _text_extended(self, kind: TextKind, text: str) -> bytes:
        if kind == "reasoning":
            return self._delta({"type": "thinking_delta", "thinking": text})
        return self._delta({"type": "text_delta", "text": text})

    def _call_opened(self, call: CallDelta) -> Iterator[bytes]:
        yield self._block_start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})

    def _call_extended(self, arguments: str) -> bytes:
        return self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _closed(self, kind: TextKind | Literal["call"], status: str) -> Iterator[bytes]:
        if kind == "reasoning":
            yield self._delta({"type": "signature_delta", "signature": ""})
        yield encode_event("content_block_stop", {"index": self._index})

    def _block_start(self, block: Mapping[str, Any]) -> bytes:
        self._index += 1
        return encode_event("content_block_start", {"index": self._index, "content_block": block})

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return encode_event("content_block_delta", {"index": self._index, "delta": delta})
