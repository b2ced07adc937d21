"""Renders chat templates and tokenizes, in worker threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from quire.config.options import ChatOptions
from quire.engine.wire.protocol import TokenArray
from quire.multimodal.chat_template import ChatTemplate, load_templates
from quire.multimodal.errors import PromptError
from quire.multimodal.messages import normalize
from quire.multimodal.tokenizer import Tokenizer

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
_MIN_CHARACTER_LIMIT = 1 << 20  # of texts that need not fit into the context; raised for longer contexts
_END_OF_CONTENT = "\ue000quire:cut\ue000"  # inserted after the text of a message that is continued
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt, and its text, which is None if the client sent token ids."""

    token_ids: TokenArray
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The input of a chat template: messages, tools and options."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


class Renderer:
    """Makes the prompts of one model."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, options: ChatOptions, max_model_len: int) -> None:
        """Read the model's chat templates.

        Raises:
            PromptError: the file of --chat-template is not a valid template.
        """
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._defaults = dict(options.default_chat_template_kwargs)
        self._sources = load_templates(folder, tokenizer.config)
        if options.chat_template is not None:
            self._sources = {"default": options.chat_template.read_text(encoding="utf-8")}
        self._compile = lru_cache(maxsize=32)(ChatTemplate)
        if options.chat_template is not None:
            self._compile(self._sources["default"])
        # With two threads, one long prompt does not delay all others.
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="quire-render")

    async def text(self, text: str, *, add_special_tokens: bool, room: int | None = None) -> Prompt:
        """Tokenize a text.

        Args:
            text: the prompt.
            add_special_tokens: add the special tokens that the model expects at the start and end.
            room: number of tokens; texts that certainly have more are refused without being tokenized.

        Raises:
            PromptError: the text is too long or contains lone surrogates.
        """
        self._check_size(text, room)
        return await self._in_worker(partial(self._encode, text, add_special_tokens))

    async def chat(self, conversation: Conversation, *, room: int | None = None) -> Prompt:
        """Render and tokenize a conversation. `room`: as in `text`.

        Raises:
            PromptError: the template refuses it, or the prompt is too long.
        """
        return await self._in_worker(partial(self._chat, conversation, room))

    async def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, with special tokens."""
        return await self._in_worker(partial(self.tokenizer.decode, tokens, skip_special_tokens=False))

    def reads(self, conversation: Conversation, name: str) -> bool:
        """Whether the template of a conversation reads a variable."""
        return name in self._template(conversation).variables

    def final_text(self, conversation: Conversation) -> str:
        """Text of the last message, as it is passed to the template."""
        (last,) = normalize(conversation.messages[-1:], as_parts=self._template(conversation).wants_parts)
        content = last["content"]
        return content if isinstance(content, str) else "".join(part["text"] for part in content)

    @property
    def has_template(self) -> bool:
        """Whether conversations without a template of their own can be rendered."""
        return "default" in self._sources

    @property
    def template(self) -> str:
        """Sources of all templates, concatenated."""
        return "\n".join(self._sources.values())

    def close(self) -> None:
        """End the worker threads."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def _in_worker(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    def _encode(self, text: str, add_special_tokens: bool) -> Prompt:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # from escapes in JSON, or from templates
            raise PromptError(f"The prompt contains an invalid character: {error}", "input_text") from error
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return Prompt(np.array(ids, np.int32), text)

    def _chat(self, conversation: Conversation, room: int | None) -> Prompt:
        text = self._render(conversation)
        self._check_size(text, room)
        return self._encode(text, conversation.add_special_tokens)

    def _render(self, conversation: Conversation) -> str:
        reserved = sorted(_RESERVED & set(conversation.variables))
        if reserved:
            raise PromptError(f"chat_template_kwargs cannot set {', '.join(reserved)}.", "chat_template_kwargs")
        template = self._template(conversation)
        messages = normalize(conversation.messages, as_parts=template.wants_parts)
        if conversation.continue_final_message:
            _mark_end(messages)
        text = template.render(
            {
                **self.tokenizer.special,
                **self._defaults,
                **conversation.variables,
                "messages": messages,
                "tools": list(conversation.tools) if conversation.tools else None,
                "documents": list(conversation.documents) if conversation.documents else None,
                "add_generation_prompt": conversation.add_generation_prompt,
            }
        )
        if not conversation.continue_final_message:
            return text
        head, found, _ = text.rpartition(_END_OF_CONTENT)
        if not found:
            raise PromptError(
                "The chat template does not render the text of the final message, so that it cannot be continued.",
                "continue_final_message",
            )
        return head

    def _template(self, conversation: Conversation) -> ChatTemplate:
        named = "tool_use" if conversation.tools and "tool_use" in self._sources else "default"
        source = conversation.template or self._sources.get(named)
        if source is None:
            raise PromptError(
                "The model has no chat template; start the server with --chat-template, or use /v1/completions.",
                "messages",
            )
        return self._compile(source)

    def _check_size(self, text: str, room: int | None) -> None:
        if room is not None and len(text) > room * self.tokenizer.longest_token:
            raise PromptError(
                f"The prompt has {len(text)} characters, too many for the context of {self.max_model_len} tokens.",
                "input_text",
            )
        limit = max(_MIN_CHARACTER_LIMIT, self.max_model_len * self.tokenizer.longest_token)
        if len(text) > limit:
            raise PromptError(f"The text has {len(text)} characters; at most {limit} are allowed.", "input_text")


def _mark_end(messages: list[dict[str, Any]]) -> None:
    """Append the marker to the text of the last message."""
    if not messages:
        raise PromptError("There is no final message to continue.", "continue_final_message")
    content = messages[-1]["content"]
    if isinstance(content, str):
        messages[-1]["content"] = content + _END_OF_CONTENT
    else:
        last = content[-1]["text"] if content else ""
        messages[-1]["content"] = [*content[:-1], {"type": "text", "text": last + _END_OF_CONTENT}]
