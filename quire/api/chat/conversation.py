"""From a request with messages to what its chat template is given."""

from __future__ import annotations

from typing import Any

from quire.api.answers.tools.custom import as_function, as_function_call
from quire.api.http.errors import InvalidRequest
from quire.api.protocol.chat import ChatRequest, Message
from quire.api.protocol.models import TokenizeRequest
from quire.multimodal import renderer


def unread_fields(
    body: ChatRequest | TokenizeRequest, conversation: renderer.ChatRequest, templates: renderer.Renderer
) -> list[str]:
    """Names of what a request gives to its template, and the template never reads.

    Raises:
        PromptError: there is no template, or it is none.
    """
    given = [name for name in ("tools", "documents") if getattr(conversation, name)]
    variables = sorted(body.chat_template_kwargs or ())
    return [
        *(name for name in given if not templates.reads(conversation, name)),
        *(f"chat_template_kwargs.{name}" for name in variables if not templates.reads(conversation, name)),
    ]


def conversation_of(body: ChatRequest | TokenizeRequest, *, trusted: bool) -> renderer.ChatRequest:
    """What the template is given.

    Raises:
        InvalidRequest: the request brings a template, and the server does not trust those; or a call that is none.
    """
    if body.chat_template is not None and not trusted:
        raise InvalidRequest("`chat_template` needs a server with --trust-request-chat-template.", "chat_template")
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    documents = None
    if isinstance(body, ChatRequest):
        documents = body.documents
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
    return renderer.ChatRequest(
        messages=[_turn(message, place) for place, message in enumerate(body.messages or ())],
        tools=[as_function(tool) for tool in body.tools or ()] or None,
        documents=documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=bool(body.add_special_tokens),
        template=body.chat_template,
        variables=variables,
    )


def _turn(message: Message, place: int) -> dict[str, Any]:
    turn = message.model_dump(exclude_unset=True)
    if message.tool_calls:
        turn["tool_calls"] = [
            as_function_call(call, f"messages[{place}].tool_calls[{number}]")
            for number, call in enumerate(message.tool_calls)
        ]
    return turn
