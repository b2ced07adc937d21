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

START, END = "<|im_start|>assistant\n", "<|im_end|>"
NO_THINKING = "<think>\n\n</think>\n\n"


def _raise(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@lru_cache(maxsize=1)
def template() -> jinja2.Template:
    """The chat template, in the environment in which servers render it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    return environment.from_string((HERE / "chat_template.jinja").read_text("utf-8"))


def render_prompt(messages: list[Message], tools: list[dict[str, Any]] | None = None, thinking: bool = True) -> str:
    """The prompt up to the model's turn."""
    return template().render(messages=messages, tools=tools, add_generation_prompt=True, enable_thinking=thinking)


def render_reply(message: Message, think: str = "") -> str:
    """What the model writes for a message, up to the end mark."""
    text = f"<think>\n{think}\n</think>\n\n" if think else ""
    if message.get("tool_calls"):
        call = message["tool_calls"][0]["function"]
        return f"{text}<tool_call>\n{_tojson({'name': call['name'], 'arguments': call['arguments']})}\n</tool_call>"
    return text + str(message["content"])


@dataclass(frozen=True)
class Encoded:
    """Token ids, and for each whether the model is to learn to write it."""

    ids: list[int]
    learnt: list[bool]


def encode(conversation: Conversation, tokenizer: Tokenizer) -> Encoded:
    """The conversation as tokens; loss falls on the model's messages that are to be trained, and their end marks."""
    prompt = render_prompt(conversation.messages[:-1], conversation.tools, conversation.thinking)
    think = conversation.think if conversation.thinking else ""
    text = prompt + render_reply(conversation.messages[-1], think) + END
    marked = zip(conversation.trained, conversation.messages, strict=True)
    flags = [flag for flag, message in marked if message["role"] == "assistant"]
    spans = _reply_spans(text, prompt, flags)
    encoding = tokenizer.encode(text, add_special_tokens=False)
    learnt, at = [], 0
    for start, stop in encoding.offsets:
        while at < len(spans) and start >= spans[at][1]:
            at += 1
        learnt.append(at < len(spans) and spans[at][0] <= start and stop <= spans[at][1])
    return Encoded(encoding.ids, learnt)


def encode_echo(text: str, copies: int, tokenizer: Tokenizer) -> Encoded:
    """A text several times over; each copy after the first is to be learnt. It makes copying circuits form early."""
    ids: list[int] = tokenizer.encode(text + "\n", add_special_tokens=False).ids
    return Encoded(ids * copies, [False] * (len(ids) + 1) + [True] * (len(ids) * (copies - 1) - 1))


def encode_table(rows: list[tuple[str, str]], tokenizer: Tokenizer) -> Encoded:
    """Rows of a question and a result, many on end; the results are to be learnt."""
    ids: list[int] = []
    learnt: list[bool] = []
    for question, result in rows:
        for text, flag in ((question, False), (result, True), (", ", False)):
            piece = tokenizer.encode(text, add_special_tokens=False).ids
            ids += piece
            learnt += [flag] * len(piece)
    return Encoded(ids, learnt)


def _reply_spans(text: str, prompt: str, flags: list[bool]) -> list[tuple[int, int]]:
    """Where in the text the trained replies are."""
    spans, at = [], 0
    for number, flag in enumerate(flags):
        start = len(prompt) if number == len(flags) - 1 else text.index(START, at) + len(START)
        stop = text.index(END, start) + len(END)
        if flag:
            spans.append((start, stop))
        at = stop
    return spans
