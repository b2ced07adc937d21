"""Normalizes messages for chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from quire.multimodal.errors import PromptError

Message = dict[str, Any]
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}


AUDIO_PART: Message = {"type": "audio"}  # stands for audio that has been taken out of a message


def normalize(messages: Sequence[Mapping[str, Any]], *, as_parts: bool, audio: str | None = None) -> list[Message]:
    """Copies of the messages, with content as text or as a list of parts, and tool arguments as objects.

    Args:
        messages: messages of a conversation.
        as_parts: whether contents become lists.
        audio: the text that stands for `AUDIO_PART` in a text; None: there is no audio.

    Raises:
        PromptError: a content part or a tool call is not valid.
    """
    return [_normalize(message, f"messages[{i}]", as_parts, audio) for i, message in enumerate(messages)]


def _normalize(message: Mapping[str, Any], where: str, as_parts: bool, audio: str | None) -> Message:
    out = {key: value for key, value in message.items() if value is not None}
    parts = _parts(message.get("content"), f"{where}.content", audio)
    if as_parts:
        out["content"] = [dict(AUDIO_PART) if part is None else {"type": "text", "text": part} for part in parts]
    else:
        out["content"] = "\n".join(audio or "" if part is None else part for part in parts)
    calls = out.get("tool_calls")
    if calls:
        out["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    else:
        out.pop("tool_calls", None)
    reasoning = out.get("reasoning") or out.get("reasoning_content")
    if reasoning:  # templates use either name
        out["reasoning"] = out["reasoning_content"] = reasoning
    return out


def _parts(content: Any, where: str, audio: str | None) -> list[str | None]:
    """The text of each part; None for audio."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    parts = [
        None if audio is not None and part == AUDIO_PART else _text_of(part, f"{where}[{i}]")
        for i, part in enumerate(content)
    ]
    # Clients send an empty text with audio. Between two texts it is a line of its own, as in vLLM.
    return [part for part in parts if part != ""] if None in parts else parts


def _text_of(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text" if "text" in part else None)
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise PromptError(f"Content parts of type {kind!r} are not supported; this model accepts text only.", where)
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
