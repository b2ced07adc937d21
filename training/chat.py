"""Conversations as token ids with a loss mask, in the format of ``chat_template.jinja``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from training.books import HERE
from training.generators.turn import Conversation, Message

REPLY_START, END_OF_TURN = "<|im_start|>assistant\n", "<|im_end|>"
NO_THINKING = "<think>\n\n</think>\n\n"


def _raise(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@lru_cache(maxsize=1)
def template() -> jinja2.Template:
    """Return the chat template, in the same jinja2 environment as servers use."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    return environment.from_string((HERE / "chat_template.jinja").read_text("utf-8"))


def render_prompt(messages: list[Message], tools: list[dict[str, Any]] | None = None, thinking: bool = True) -> str:
    """Render the prompt up to the model's reply."""
    return template().render(messages=messages, tools=tools, add_generation_prompt=True, enable_thinking=thinking)


def render_reply(message: Message, think: str = "") -> str:
    """Render the model's reply, without the end-of-turn token."""
    text = f"<think>\n{think}\n</think>\n\n" if think else ""
    if message.get("tool_calls"):
        call = message["tool_calls"][0]["function"]
        return f"{text}<tool_call>\n{_tojson({'name': call['name'], 'arguments': call['arguments']})}\n</tool_call>"
    return text + str(message["content"])


@dataclass(frozen=True)
class Encoded:
    """Token ids, and a loss mask with one value per token."""

    ids: list[int]
    loss_mask: list[bool]


def encode(conversation: Conversation, tokenizer: Tokenizer) -> Encoded:
    """Encode a conversation; the loss mask covers the model's trained messages and their end-of-turn tokens."""
    prompt = render_prompt(conversation.messages[:-1], conversation.tools, conversation.thinking)
    think = conversation.think if conversation.thinking else ""
    text = prompt + render_reply(conversation.messages[-1], think) + END_OF_TURN
    replies = [at for at, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    spans = _reply_spans(text, prompt, [conversation.trained[at] for at in replies])
    of_grammar = _given_spans(text, prompt, [conversation.given.get(at, ()) for at in replies])
    encoding = tokenizer.encode(text, add_special_tokens=False)
    loss_mask, at = [], 0
    for start, stop in encoding.offsets:
        while at < len(spans) and start >= spans[at][1]:
            at += 1
        inside = at < len(spans) and spans[at][0] <= start and stop <= spans[at][1]
        loss_mask.append(inside and not any(first <= start < last for first, last in of_grammar))
    return Encoded(encoding.ids, loss_mask)


def encode_echo(text: str, copies: int, tokenizer: Tokenizer) -> Encoded:
    """Encode a text several times; the loss mask covers each copy after the first. This trains copying early."""
    ids: list[int] = tokenizer.encode(text + "\n", add_special_tokens=False).ids
    return Encoded(ids * copies, [False] * (len(ids) + 1) + [True] * (len(ids) * (copies - 1) - 1))


def encode_table(rows: list[tuple[str, str]], tokenizer: Tokenizer) -> Encoded:
    """Encode consecutive rows of a question and a result; the loss mask covers the results."""
    ids: list[int] = []
    loss_mask: list[bool] = []
    for question, result in rows:
        for text, flag in ((question, False), (result, True), (", ", False)):
            piece = tokenizer.encode(text, add_special_tokens=False).ids
            ids += piece
            loss_mask += [flag] * len(piece)
    return Encoded(ids, loss_mask)


def _all_reply_spans(text: str, prompt: str, count: int) -> list[tuple[int, int]]:
    """Return the character spans of all replies."""
    spans, at = [], 0
    for number in range(count):
        start = len(prompt) if number == count - 1 else text.index(REPLY_START, at) + len(REPLY_START)
        at = text.index(END_OF_TURN, start) + len(END_OF_TURN)
        spans.append((start, at))
    return spans


def _reply_spans(text: str, prompt: str, flags: list[bool]) -> list[tuple[int, int]]:
    """Return the character spans of the trained replies."""
    spans = _all_reply_spans(text, prompt, len(flags))
    return [span for span, flag in zip(spans, flags, strict=True) if flag]


def _given_spans(text: str, prompt: str, spans_of_replies: list[tuple[tuple[int, int], ...]]) -> list[tuple[int, int]]:
    """Return the character spans in the replies that a grammar writes."""
    if not any(spans_of_replies):
        return []
    replies = _all_reply_spans(text, prompt, len(spans_of_replies))
    return [
        (start + first, start + last)
        for (start, _), parts in zip(replies, spans_of_replies, strict=True)
        for first, last in parts
    ]
