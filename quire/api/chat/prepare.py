"""From the fields of a chat request to sequences that the engine can run. All chat-like endpoints prepare with this."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.api.chat.chunks import ChatChunkFields
from quire.api.chat.conversation import WithMessages, conversation_of, unused_template_fields
from quire.api.chat.media import ChatMedia, MediaSettings, take_media
from quire.api.chat.media_parts import media_places
from quire.engine.client.origin import activity
from quire.engine.client.protocol import AudioItem, MediaItem, PictureItem
from quire.engine.client.records import ToolRequest
from quire.engine.client.stream import GenerateRequest
from quire.multimodal.picture_settings import MEDIA_IO, PROCESSOR
from quire.multimodal.placement import place_items
from quire.parsing.answer import AnswerFormat, AnswerParser, ReasoningCounter
from quire.parsing.logprobs import LogprobFormatter
from quire.parsing.structured.constraint import checked_grammar
from quire.parsing.tools.choice import tool_plan
from quire.protocol.chat import ChatRequest, Message
from quire.protocol.errors import InvalidRequest
from quire.rendering.prompts import EFFORT, NO_EFFORT, THINKING_SWITCHES, Conversation, Prompt, RenderedChat
from quire.serving.beams.options import BeamOptions, unused_with_beams
from quire.serving.generation import MediaName, UsageCounter
from quire.serving.models import GeneratingModel, ServedModel, ServerState
from quire.serving.params import plan_sequences
from quire.workers.tenant import current_tenant


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A checked chat request: `n` sequences with one prompt.

    Attributes:
        head: fields that all chunks of the response share.
        final_text: text of the last message.
        unused_fields: names of fields that have no effect: the chat template, or beam search, does not read them.
        beams: options of the beam search; None: answers are sampled.
    """

    head: ChatChunkFields
    body: ChatRequest
    model: GeneratingModel
    prompt: Prompt
    answer_format: AnswerFormat
    final_text: str
    requests: Sequence[GenerateRequest]
    unused_fields: Sequence[str]
    beams: BeamOptions | None = None

    @property
    def formatter(self) -> LogprobFormatter:
        """Formats log-probabilities."""
        return LogprobFormatter(self.model.renderer.tokenizer, as_ids=bool(self.body.return_tokens_as_token_ids))

    @property
    def role(self) -> str:
        """Role of the answer: that of a continued message, otherwise `assistant`."""
        return self.body.messages[-1].role if self.body.continue_final_message else "assistant"

    @property
    def echo(self) -> str:
        """Text that precedes each answer, if the request asks for `echo`."""
        echoed = self.body.echo and self.body.messages[-1].role == self.role
        return self.final_text if echoed else ""

    def parser(self, api: ToolRequest, *, streams: bool) -> AnswerParser:
        """A parser of one answer, whose search for tool calls is counted. `api`: that of the request."""
        report = partial(self.model.client.observers.on_tool_parse, api, streams)
        return self.answer_format.parser(report, each_piece=streams)

    def reasoning_counter(self) -> ReasoningCounter:
        """A counter of the reasoning tokens of one answer."""
        return self.answer_format.counter(self.model.renderer.tokenizer.token_text)

    def usage_counter(self) -> UsageCounter:
        """A counter of all tokens of the request."""
        items = self.requests[0].items
        media: dict[MediaName, int] = {
            "audio": sum(item.length for item in items if isinstance(item, AudioItem)),
            "image": sum(item.embeddings for item in items if isinstance(item, PictureItem) and not item.is_video),
            "video": sum(item.embeddings for item in items if isinstance(item, PictureItem) and item.is_video),
        }
        return UsageCounter([len(self.prompt.token_ids)], len(self.requests), media)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt of a conversation.

    Attributes:
        prompt: with placeholders for its media.
        items: its media.
        unused_fields: paths of fields of media that have no effect.
    """

    rendered: RenderedChat
    prompt: Prompt
    items: tuple[MediaItem, ...]
    unused_fields: Sequence[str]


async def render_chat(
    body: WithMessages, model: ServedModel, state: ServerState, sequences: int, *, max_tokens: int | None = None
) -> ChatPrompt:
    """Prepare the media of a conversation, whose messages are changed in place, and render it.

    Args:
        body: the request.
        model: its model.
        state: limits of media.
        sequences: requests to the engine that will have the items.
        max_tokens: as in `Renderer.text`.

    Raises:
        InvalidRequest: a content part is not valid, or the model does not read it.
        PromptError: the conversation cannot be rendered.
    """
    media = await take_media(media_places(body.messages or ()), settings_of(body), model, state, sequences)
    conversation = conversation_of(
        body,
        trusted=state.trust_request_chat_template,
        media=media.placeholder_texts,
        pictures=media.picture_texts,
    )
    return await render_conversation(conversation, media, model, max_tokens=max_tokens)


def settings_of(body: Any) -> MediaSettings:
    """What a request says about its media."""
    return MediaSettings(*(getattr(body, name, None) or {} for name in (PROCESSOR, MEDIA_IO)))


async def render_conversation(
    conversation: Conversation, media: ChatMedia, model: ServedModel, *, max_tokens: int | None = None
) -> ChatPrompt:
    """Render a conversation whose media are prepared.

    Raises:
        PromptError: it cannot be rendered.
    """
    with activity("render"):
        rendered = await model.renderer.chat(conversation, max_tokens=max_tokens, tenant=current_tenant())
    prompt = rendered.prompt
    items: tuple[MediaItem, ...] = ()
    placeholders = media.placeholders
    if placeholders:
        tokens, items = place_items(prompt.token_ids, placeholders)
        prompt = Prompt(tokens, prompt.text)
    return ChatPrompt(rendered, prompt, items, media.unused_fields)


async def prepare_chat(body: ChatRequest, model: GeneratingModel, state: ServerState, response_id: str) -> PreparedChat:
    """Render the conversation and check everything that can be checked before the request runs.

    The messages and tools are then removed from `body`.

    Raises:
        InvalidRequest: a field is not valid.
        PromptError: the conversation cannot be rendered.
    """
    sequences = plan_sequences(body, model, state, visible_tokens=model.parser_tokens)
    plan = tool_plan(body, model.tools)
    if body.truncate_prompt_tokens is not None and media_places(body.messages):
        raise InvalidRequest(
            "`truncate_prompt_tokens` is not supported for chats with media.", "truncate_prompt_tokens"
        )
    fits = body.truncate_prompt_tokens is None
    chat = await render_chat(body, model, state, sequences.n, max_tokens=model.info.max_model_len if fits else None)
    rendered = chat.rendered
    _check_effort(body, rendered, model)
    prompt = sequences.fit(chat.prompt)
    continued = rendered.final_text if body.continue_final_message else ""
    tags = None if model.reasoning is None else model.reasoning.switched(rendered.thinking, rendered.prompt.text)
    answer_format = AnswerFormat(
        tags=tags, prompt=rendered.prompt.text, continued=continued, plan=plan, tools=model.tools
    )
    grammar = await checked_grammar(body, model.grammars, tags, model.tools, answer_format.reasoning_prefix, plan)
    unused_fields = unused_template_fields(body, rendered, switched=_is_switchable(model))
    # The conversation is not needed any more, and may be large. Of its messages only the last one's role is.
    body.messages = [Message(role=body.messages[-1].role)]
    body.tools = None
    body.documents = None
    return PreparedChat(
        head=ChatChunkFields(response_id, int(time.time()), model.names[0]),
        body=body,
        model=model,
        prompt=prompt,
        answer_format=answer_format,
        final_text=rendered.final_text,
        requests=sequences.requests(prompt, grammar, chat.items),
        unused_fields=[*unused_fields, *unused_with_beams(body), *chat.unused_fields],
        beams=sequences.beams,
    )


def _is_switchable(model: GeneratingModel) -> bool:
    return model.reasoning is not None and model.reasoning.switchable


def _check_effort(body: ChatRequest, rendered: RenderedChat, model: GeneratingModel) -> None:
    """Check that `reasoning_effort` has an effect.

    Raises:
        InvalidRequest: it has none.
    """
    if body.reasoning_effort is None or EFFORT in rendered.variables:
        return
    if not rendered.variables.isdisjoint(THINKING_SWITCHES):
        return
    if body.reasoning_effort != NO_EFFORT:
        raise InvalidRequest(
            "`reasoning_effort` is not supported: this model's chat template does not read it.", "reasoning_effort"
        )
    if model.reasoning is not None and not model.reasoning.switchable:
        raise InvalidRequest(
            '`reasoning_effort` "none" is not supported: this model\'s chat template cannot switch reasoning off.',
            "reasoning_effort",
        )
