"""From a request with messages to the input of its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.parsing.tools.custom import as_function, as_function_call
from quire.protocol import fields
from quire.protocol.chat import ChatRequest, Message
from quire.protocol.errors import InvalidRequest
from quire.protocol.models import TokenizeRequest
from quire.protocol.pooling.requests import ChatInput
from quire.rendering.picture_texts import PictureTexts
from quire.rendering.prompts import EFFORT, NO_EFFORT, THINKING_SWITCHES, Conversation, RenderedChat

UNTRUSTED_TEMPLATE = "`chat_template` requires a server with --trust-request-chat-template."
WithMessages = ChatRequest | TokenizeRequest | ChatInput


def unused_template_fields(body: WithMessages, rendered: RenderedChat, *, switched: bool = False) -> list[str]:
    """Names of fields that were passed to the chat template, but that it does not read.

    `switched`: the reasoning parser obeys the switches of reasoning, whether the template reads them or not.
    """
    read = set(rendered.variables)
    if switched:
        read.update(THINKING_SWITCHES)
    variables = dict(body.chat_template_kwargs or {})
    if not read.isdisjoint(THINKING_SWITCHES) and variables.get(EFFORT) == NO_EFFORT:
        read.add(EFFORT)
    passed = [name for name in ("tools", "documents") if getattr(body, name, None)]
    return [
        *(name for name in passed if name not in read),
        *(f"chat_template_kwargs.{name}" for name in sorted(variables) if name not in read),
        *_unread_message_fields(body.messages or (), rendered),
    ]


def _unread_message_fields(messages: Sequence[Message], rendered: RenderedChat) -> list[str]:
    """Undeclared fields of messages that the template does not read; of those with the same name only the first."""
    unread: dict[str, str] = {}
    if rendered.keys is not None:
        for index, message in enumerate(messages):
            for name, value in message.passed_to_template():
                key = name.rpartition(".")[2]
                kind = fields.without_indices(f"messages.{name}")
                if value is not None and key not in rendered.keys and not fields.is_harmless(kind):
                    unread.setdefault(kind, f"messages[{index}].{name}")
    return list(unread.values())


def conversation_of(
    body: WithMessages, *, trusted: bool, media: Mapping[str, str] | None = None, pictures: PictureTexts | None = None
) -> Conversation:
    """The input of the chat template.

    Args:
        body: the request.
        trusted: whether requests may bring their own template.
        media: texts that stand for media, by the types of media in the messages; see `Conversation`.
        pictures: the pictures in the messages.

    Raises:
        InvalidRequest: the request brings a template without being trusted, or a tool call is malformed.
    """
    if body.chat_template is not None and not trusted:
        raise InvalidRequest(UNTRUSTED_TEMPLATE, "chat_template")
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    documents = None
    if isinstance(body, ChatRequest):
        documents = body.documents
        if body.reasoning_effort is not None:
            variables[EFFORT] = body.reasoning_effort
    return Conversation(
        messages=[_message(message, index) for index, message in enumerate(body.messages or ())],
        tools=[as_function(tool) for tool in getattr(body, "tools", None) or ()] or None,
        documents=documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=bool(body.add_special_tokens),
        template=body.chat_template,
        variables=variables,
        media=media or {},
        pictures=pictures,
    )


def _message(message: Message, index: int) -> dict[str, Any]:
    set_fields = fields.set_fields(message)
    if message.tool_calls:
        set_fields["tool_calls"] = [
            as_function_call(call, f"messages[{index}].tool_calls[{number}]")
            for number, call in enumerate(message.tool_calls)
        ]
    return set_fields
