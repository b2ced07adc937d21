"""A chat request from its fields to sequences that can run: what chat completions and messages have in common."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from quire.api.answers.answer import Reading, ReasoningCounter
from quire.api.answers.logprobs import LogprobFormatter
from quire.api.answers.structured.constraint import checked_grammar
from quire.api.answers.tools.choice import tool_plan
from quire.api.chat.chunks import ChunkHead
from quire.api.chat.conversation import conversation_of, unread_fields
from quire.api.http.errors import InvalidRequest
from quire.api.protocol.chat import ChatRequest
from quire.api.serving.generation import Tally
from quire.api.serving.models import ServedModel, Services
from quire.api.serving.params import room_for_output, sampling_params, sequences, truncated
from quire.engine.wire.stream import GenerateRequest
from quire.multimodal.renderer import Prompt


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A checked request: `n` sequences behind one prompt.

    Attributes:
        unread: names of what it gives to its template, and the template never reads.
    """

    head: ChunkHead
    body: ChatRequest
    model: ServedModel
    prompt: Prompt
    reading: Reading
    final_text: str
    requests: Sequence[GenerateRequest]
    unread: Sequence[str]

    @property
    def formatter(self) -> LogprobFormatter:
        """Writes log-probabilities."""
        return LogprobFormatter(self.model.renderer.tokenizer, as_ids=bool(self.body.return_tokens_as_token_ids))

    @property
    def role(self) -> str:
        """Who speaks: the assistant, unless a last message of somebody else's is continued."""
        return self.body.messages[-1].role if self.body.continue_final_message else "assistant"

    @property
    def echo(self) -> str:
        """What stands before each answer."""
        echoed = self.body.echo and self.body.messages[-1].role == self.role
        return self.final_text if echoed else ""

    def counter(self) -> ReasoningCounter:
        """Counts the reasoning tokens of one answer."""
        return self.reading.counter(self.model.renderer.tokenizer.token_text)

    def tally(self) -> Tally:
        """Counts all tokens."""
        return Tally([len(self.prompt.token_ids)], len(self.requests))


async def prepare_chat(body: ChatRequest, services: Services, call_id: str) -> ChatCall:
    """Render the conversation and check all that can be checked before it runs.

    Raises:
        InvalidRequest: a field that cannot be granted.
        NotFound: there is no such model.
        PromptError: the conversation cannot be rendered.
    """
    model = services.model(body.model)
    plan = tool_plan(body, model.tools)
    conversation = conversation_of(body, trusted=services.trust_request_chat_template)
    if body.reasoning_effort is not None and not model.renderer.reads(conversation, "reasoning_effort"):
        raise InvalidRequest("`reasoning_effort` has no effect on this model.", "reasoning_effort")
    unread = unread_fields(body, conversation, model.renderer)
    room = None if body.truncate_prompt_tokens is not None else model.info.max_model_len
    rendered = await model.renderer.chat(conversation, room=room)
    prompt = truncated(rendered, body, model)
    max_tokens = room_for_output(prompt, model, body.max_completion_tokens or body.max_tokens)
    final_text = model.renderer.final_text(conversation) if body.echo or body.continue_final_message else ""
    continued = final_text if body.continue_final_message else ""
    whole = model.tools if model.tools is not None and model.tools.whole else None
    reading = Reading(tags=model.reasoning, prompt=rendered.text, continued=continued, plan=plan, whole=whole)
    params = sampling_params(
        body,
        model,
        services.limits,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=await checked_grammar(body, model.grammars, model.reasoning, model.tools, reading.thought, plan),
    )
    return ChatCall(
        head=ChunkHead(call_id, int(time.time()), model.names[0]),
        body=body,
        model=model,
        prompt=prompt,
        reading=reading,
        final_text=final_text,
        requests=sequences(body, prompt, params, services.limits, model.shown_tokens),
        unread=unread,
    )
