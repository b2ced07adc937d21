"""Normalizes messages for chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from quire.multimodal.errors import PromptError

Message = dict[str, Any]
_SHOWN = 80  # characters of a type in an error text
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# They stand for media that have been taken out of a message.
AUDIO_PART: Message = {"type": "audio"}
IMAGE_PART: Message = {"type": "image"}
VIDEO_PART: Message = {"type": "video"}


def normalize(
    messages: Sequence[Mapping[str, Any]],
    *,
    as_parts: bool,
    media: Mapping[str, str] | None = None,
    separator: str = "\n",
) -> list[Message]:
    """Copies of the messages, with content as text or as a list of parts.

    Args:
        messages: messages of a conversation.
        as_parts: whether contents become lists.
        media: texts that stand for `AUDIO_PART` and the others in a text, by their types, of those that the messages
            may have.
        separator: what stands between the parts of a content that becomes a text.

    Raises:
        PromptError: a content part is not valid.
    """
    return [
        _normalize(message, f"messages[{i}]", media or {}, None if as_parts else separator)
        for i, message in enumerate(messages)
    ]


def with_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, with the arguments of tool calls as objects.

    Raises:
        PromptError: a tool call is not valid.
    """
    return [
        {
            **message,
            "tool_calls": [_tool_call(call, f"messages[{i}].tool_calls[{j}]") for j, call in enumerate(calls)],
        }
        if (calls := message.get("tool_calls"))
        else message
        for i, message in enumerate(messages)
    ]


def _normalize(message: Mapping[str, Any], where: str, media: Mapping[str, str], separator: str | None) -> Message:
    """`separator`: see `normalize`; None: contents become lists."""
    out = {key: value for key, value in message.items() if value is not None}
    parts = _parts(message.get("content"), f"{where}.content", media)
    if separator is None:
        out["content"] = [{"type": "text", "text": part} if isinstance(part, str) else dict(part) for part in parts]
    else:
        out["content"] = separator.join(part if isinstance(part, str) else media[part["type"]] for part in parts)
    if not out.get("tool_calls"):
        out.pop("tool_calls", None)
    reasoning = out.get("reasoning") or out.get("reasoning_content")
    if reasoning:  # templates use either name
        out["reasoning"] = out["reasoning_content"] = reasoning
    return out


def _parts(content: Any, where: str, media: Mapping[str, str]) -> list[str | Message]:
    """The text of each part; of media what stands for them. A document has been replaced by a list of these."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    stand_ins = [part for part in (AUDIO_PART, IMAGE_PART, VIDEO_PART) if part["type"] in media]
    parts = [
        piece if piece in stand_ins else _text_of(piece, f"{where}[{i}]")
        for i, part in enumerate(content)
        for piece in (part if isinstance(part, list) else (part,))
    ]
    # Clients send an empty text with media. Between two texts it is a line of its own, as in vLLM.
    return parts if all(isinstance(part, str) for part in parts) else [part for part in parts if part != ""]


def _text_of(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text" if "text" in part else None)
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        name = repr(kind)[:_SHOWN]
        raise PromptError(f"Content parts of type {name} are not supported; this model accepts text only.", where)
    text = part.get(key)
    if not isinstance(text, str):
        raise PromptError(f"A content part of type {kind!r} needs a string in {key!r}.", where)
    return text


def _tool_call(call: Mapping[str, Any], where: str) -> Message:
    fields = call.get("function") or {}
    if not isinstance(fields, Mapping):
        raise PromptError("The `function` of a tool call must be an object.", where)
    function = dict(fields)
    if isinstance(function.get("arguments"), str):
        function["arguments"] = _arguments(function["arguments"], where)
    return {**call, "function": function}


def _arguments(text: str, where: str) -> Any:
    if not text.strip():
        return {}
    try:
        orjson.loads(text)  # refuses NaN and lone surrogates, but converts long integers to floats
        return json.loads(text)
    except ValueError as error:
        raise PromptError(f"The arguments of a tool call are not valid JSON: {error}", where) from error
    except RecursionError as error:
        raise PromptError("The arguments of a tool call are nested too deeply.", where) from error
