"""A Responses request as one to chat completions."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import TypeAdapter

from quire.api.http.body import request_of
from quire.api.http.errors import InvalidRequest
from quire.api.protocol.chat import ChatRequest
from quire.api.protocol.common import SampledFields
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
from quire.api.responses.mcp_tools import plain_calls

_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[InputItem])
_SAME = (*SampledFields.model_fields, "structured_outputs", "parallel_tool_calls", "chat_template_kwargs")
_MOST_SEALED = 1 << 22  # bytes of reasoning that a request may hand back


def input_items(body: ResponsesRequest) -> list[Any]:
    """The input as items."""
    if isinstance(body.input, str):
        return [InputMessage(role="user", content=[Part(type="input_text", text=body.input)])]
    return list(body.input)


def stored_items(given: Sequence[dict[str, Any]]) -> list[Any]:
    """Items that were written down."""
    return _ITEMS.validate_python(given)


def offered(tools: Iterable[AnyTool] | None) -> list[ResponseTool | ResponseCustomTool]:
    """Those tools that the client runs, and the model is told of."""
    return [
        tool
        for tool in tools or ()
        if isinstance(tool, ResponseTool | ResponseCustomTool) and tool.type in ("function", "custom")
    ]


def as_chat(body: ResponsesRequest, items: Sequence[Any]) -> ChatRequest:
    """The request to chat completions that answers these items; built-in tools are functions by now.

    Raises:
        InvalidRequest: something in it cannot be granted.
    """
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    fields |= {
        "messages": list(_messages(body.instructions, plain_calls(items))),
        "max_completion_tokens": body.max_output_tokens,
        "tools": [_tool(tool) for tool in offered(body.tools)] or None,
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
        raise InvalidRequest("`input` is empty.", "input")
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
        raise InvalidRequest("A tool of type function needs a `name`.", "tools")
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    if not offered(body.tools):
        if choice in (None, "none", "auto"):
            return None
        raise InvalidRequest("When using `tool_choice`, `tools` must hold functions or custom tools.", "tool_choice")
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
    form = None if body.text is None else body.text.format
    if isinstance(form, NamedFormat):
        schema = {"name": form.name, "description": form.description, "schema": form.content, "strict": form.strict}
        return {"type": "json_schema", "json_schema": schema}
    return None if form is None else {"type": form.type}


def _messages(instructions: str | None, items: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Turns: what the assistant thought, said and called in a row is one of them, and so are instructions at the start.

    Few templates know developers, and many take one system message only, before all else.
    """
    items = list(items)
    rules = [] if not instructions else [instructions]
    while items and isinstance(items[0], InputMessage) and items[0].role in ("system", "developer"):
        rules.append(_text(items.pop(0).content))
    if rules:
        yield {"role": "system", "content": "\n\n".join(rules)}
    turn: dict[str, Any] = {}  # of the assistant, so far
    unsealer = _Unsealer()
    for item in items:
        match item:
            case ReasoningItem():
                if turn.get("content") or turn.get("tool_calls"):
                    yield turn
                    turn = {}
                turn = {"role": "assistant", "content": None, **turn}
                turn["reasoning"] = turn.get("reasoning", "") + _thought(item, unsealer)
            case FunctionCall() | CustomToolCall():
                turn = {"role": "assistant", "content": None, **turn}
                turn.setdefault("tool_calls", []).append(_call(item))
            case InputMessage(role="assistant"):
                said = [turn["content"]] if turn.get("content") else []
                if said and not turn.get("tool_calls"):
                    yield turn
                    turn, said = {}, []
                turn = {"role": "assistant", **turn, "content": "\n".join([*said, _text(item.content)])}
            case _:
                if turn:
                    yield turn
                    turn = {}
                yield _said(item)
    if turn:
        yield turn


def _call(item: FunctionCall | CustomToolCall) -> dict[str, Any]:
    if isinstance(item, CustomToolCall):
        return {"id": item.call_id, "type": "custom", "custom": {"name": item.name, "input": item.input}}
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _said(item: InputMessage | FunctionCallOutput | CustomToolCallOutput) -> dict[str, Any]:
    if not isinstance(item, InputMessage):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
    role = "system" if item.role == "developer" else item.role
    return {"role": role, "content": _content(item.content)}


def _thought(item: ReasoningItem, unsealer: _Unsealer) -> str:
    texts = [part.text for part in item.content or ()]
    if not texts and item.encrypted_content:
        texts = [unsealer.open(item.encrypted_content)]
    return "\n".join(texts or [part.text for part in item.summary or ()])


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    parts = [_part(part) for part in content]
    if any(part["type"] != "text" for part in parts):
        raise InvalidRequest("Only messages of the user may hold anything but text.", "input")
    return "".join(part["text"] for part in parts)


def _content(content: Content) -> str | list[dict[str, Any]]:
    """Text as text, anything else as chat's parts."""
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
    raise InvalidRequest(f"Content of type `{part.type}` is not supported by this server.", "input")


# Reasoning that a client keeps for the server


def sealed(text: str) -> str:
    """Reasoning as `encrypted_content`: not secret, but opaque."""
    return base64.urlsafe_b64encode(zlib.compress(text.encode("utf-8", "replace"))).decode()


class _Unsealer:
    """Unpacks the sealed reasoning of one request; what is packed may be a thousand times as long."""

    def __init__(self) -> None:
        self._left = _MOST_SEALED

    def open(self, given: str) -> str:
        """What `sealed` was given.

        Raises:
            InvalidRequest: it was made elsewhere, or there is too much of it.
        """
        try:
            unpacker = zlib.decompressobj()
            data = unpacker.decompress(base64.urlsafe_b64decode(given), self._left)
            text = data.decode()
        except (binascii.Error, zlib.error, ValueError) as error:
            raise InvalidRequest("`encrypted_content` is none of this server's.", "input") from error
        self._left -= len(data)
        if self._left <= 0 or unpacker.unconsumed_tail:
            raise InvalidRequest("There is too much reasoning in `encrypted_content`.", "input")
        return text
