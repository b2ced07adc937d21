"""The generation of one response: its turns, its events, and the response object."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from quire.api.chat.prepare import PreparedChat
from quire.api.responses.limits import ResponseLimits
from quire.api.responses.mcp_tools import McpToolset
from quire.api.responses.writer import Event, ItemWriter
from quire.engine.client.errors import EngineError
from quire.engine.client.kv_transfer import RemoteBlocks
from quire.engine.client.protocol import TokenLogprobs
from quire.engine.client.stream import Delta
from quire.protocol.common import RequestMetrics
from quire.protocol.mcp import McpTool
from quire.protocol.responses import (
    AnyTool,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    RawMessage,
    ResponseFailure,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    Status,
)
from quire.rendering.prompts import Prompt
from quire.serving.generation import UsageCounter, generate_all, request_metrics
from quire.serving.kv_transfer import answer_params
from quire.workers.tenant import take_turn


@dataclass(slots=True)
class RawMessages:
    """The prompts and answers of all turns, as text and tokens, for `enable_response_messages`."""

    prompts: list[RawMessage] = field(default_factory=list)
    answers: list[RawMessage] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)  # of the last answer

    def start_turn(self, prompt: Prompt) -> None:
        """Append a prompt, and an answer without tokens."""
        self._end_turn()
        self.prompts.append(RawMessage(message=prompt.text or "", tokens=prompt.token_ids.tolist()))
        self.answers.append(RawMessage(message="", tokens=[]))

    def add(self, delta: Delta) -> None:
        """Append a piece of the last answer."""
        self._texts.append(delta.text)
        self.answers[-1].tokens += delta.token_ids

    def complete(self) -> tuple[list[RawMessage], list[RawMessage]]:
        """All prompts and answers."""
        self._end_turn()
        return self.prompts, self.answers

    def _end_turn(self) -> None:
        if self._texts:
            self.answers[-1].message += "".join(self._texts)
            self._texts.clear()


CLIENT_CALLS = ("function_call", "custom_tool_call")  # types of items; the client has to make these calls
_STATUS_BY_REASON: dict[str | None, Status] = {"length": "incomplete", "abort": "failed", "error": "failed"}


@dataclass(slots=True)
class ResponseRun:
    """A response that is being generated, turn by turn.

    Attributes:
        prepared: the first turn.
        items: input of the response itself, as it will be stored.
        owner: the client that it belongs to; see `owner_of`.
        tools: tools of MCP servers.
        new_lists: labels and tools of the MCP servers whose lists are not in the conversation yet.
        prepare_next: prepares the next turn from all output so far and the index in it at which the last turn begins;
            gives None if the context has no room for it.
        unused_fields: names of the request's fields that have no effect.
        ended: called when the engine has finished the only turn.
        events: all events so far; the index of an event is its sequence number.
        failure: the error that ended it, if one did.
        finished: whether the last event has been made.
        save_lock: held while it is stored.
        deleted: whether the response was deleted, so that it must not be stored again.
        unstored_reason: the reason why storing failed; None as long as that was not tried, or if it succeeded.
    """

    prepared: PreparedChat
    body: ResponsesRequest
    items: Sequence[dict[str, Any]]
    owner: str
    tools: McpToolset
    new_lists: Sequence[tuple[str, list[dict[str, Any]]]]
    prepare_next: Callable[[list[dict[str, Any]], int], Awaitable[PreparedChat | None]]
    unused_fields: Sequence[str] = ()
    ended: Callable[[], None] | None = None
    status: Status = "queued"
    events: list[Event] = field(default_factory=list)
    failure: EngineError | None = None
    finished: bool = False
    save_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    deleted: bool = False
    unstored_reason: str | None = None
    _turn_status: Status = "completed"  # of the last turn
    _completed_at: int | None = None
    _writer: ItemWriter = field(init=False)
    _raw: RawMessages | None = None  # if the request asks for them
    _usage_counters: list[UsageCounter] = field(default_factory=list)  # of all turns
    _held_blocks: RemoteBlocks | None = None

    def __post_init__(self) -> None:
        self._raw = RawMessages() if self.body.enable_response_messages else None
        encode_reasoning = "reasoning.encrypted_content" in (self.body.include or ())
        self._writer = ItemWriter(
            reasoning=self.body.include_reasoning, encode_reasoning=encode_reasoning, servers=self.tools.labels
        )

    @property
    def id(self) -> str:
        """Id of the response."""
        return self.prepared.head.id

    async def generate(self) -> AsyncGenerator[Event, None]:
        """All events but the last one, which `finish` gives."""
        self.status = "in_progress"
        for kind in ("created", "in_progress"):
            yield self._event({"type": f"response.{kind}", "response": self.to_json()})
        for label, tools in self.new_lists:
            for event in self._writer.tools_listed(label, tools):
                yield self._event(event)
        limits = ResponseLimits(self.prepared.requests[0].deadline, self.body.max_output_tokens)
        turn: PreparedChat | None = self.prepared
        while turn is not None:
            turn_start = len(self._writer.items)
            async with aclosing(self._run_turn(turn)) as events:
                async for event in events:
                    yield event
            limit_reached = self.tools.limit_reached
            calls = self._writer.pending_calls()
            async with aclosing(self._run_calls(calls, limits)) as events:
                async for event in events:
                    yield event
            client_calls = any(item["type"] in CLIENT_CALLS for item in self._writer.items[turn_start:])
            is_last_turn = not calls or client_calls or limit_reached or self._turn_status != "completed"
            turn = None if is_last_turn else await self._next_turn(limits, turn_start)
        self.status = self._turn_status

    async def _run_turn(self, turn: PreparedChat) -> AsyncGenerator[Event, None]:
        """Events of one answer of the model, up to its tool calls or its end."""
        parser = turn.parser("responses", streams=bool(self.body.stream))
        reasoning = turn.reasoning_counter()
        usage = turn.usage_counter()
        self._usage_counters.append(usage)
        if self._raw is not None:
            self._raw.start_turn(turn.prompt)
        async with aclosing(generate_all(turn.model.client, turn.requests, self.ended)) as deltas:
            async for _, delta in deltas:
                usage.add(0, delta)
                self._held_blocks = delta.held_blocks or self._held_blocks
                if self._raw is not None:
                    self._raw.add(delta)
                reasoning_tokens = reasoning.count(delta.token_ids)
                usage.reasoning += reasoning_tokens
                parsed = parser.push(delta.text, last=delta.finish_reason is not None)
                for event in self._writer.write_tokens(parsed, self._logprobs(delta.logprobs[reasoning_tokens:])):
                    yield self._event(event)
                if delta.finish_reason is not None:
                    self._turn_status = _STATUS_BY_REASON.get(delta.finish_reason, "completed")
        for event in self._writer.end_turn("incomplete" if self._turn_status == "incomplete" else "completed"):
            yield self._event(event)
        if self._turn_status != "completed":
            for event in self._writer.calls_skipped():
                yield self._event(event)

    async def _run_calls(self, calls: Sequence[dict[str, Any]], limits: ResponseLimits) -> AsyncGenerator[Event, None]:
        """Events of calls of MCP tools."""
        async with aclosing(self.tools.run_calls(calls, limits, self.prepared.model.client)) as outcomes:
            async for item, outcome in outcomes:
                if self.prepared.model.pictures is None:
                    outcome = replace(outcome, content=None)
                for event in self._writer.call_finished(item, outcome):
                    yield self._event(event)

    async def _next_turn(self, limits: ResponseLimits, turn_start: int) -> PreparedChat | None:
        """The next turn; None, and an incomplete response, if no tokens are left for it."""
        used = sum(counter.completion for counter in self._usage_counters)
        turn = await self.prepare_next(self._writer.items, turn_start) if limits.tokens_left(used) else None
        if turn is None:
            self._turn_status = "incomplete"
            return None
        return limits.apply(turn, used)

    def finish(self, status: Status | None = None, failure: EngineError | None = None) -> Event:
        """The last event. `status`: if the answer was ended from outside."""
        self.status = status or self.status
        self.failure = failure
        self.finished = True
        self._writer.abort()
        if self.status == "completed":
            self._completed_at = int(time.time())
        return self._event({"type": f"response.{_event_status(self.status)}", "response": self.to_json()})

    def mark_unstored(self, reason: str) -> None:
        """Say in the response, and in its last event, that it could not be stored. In the background, it has failed."""
        self.unstored_reason = reason
        if self.body.background and self.status in ("completed", "incomplete"):
            self.status = "failed"
            self._completed_at = None
        self.events[-1] |= {"type": f"response.{_event_status(self.status)}", "response": self.to_json()}

    def to_json(self) -> dict[str, Any]:
        """The current state of the response as JSON."""
        return self.response().model_dump(mode="json")

    def response(self) -> ResponseObject:
        """The current state of the response."""
        body = self.body
        params = self.prepared.requests[0].params
        unfinished = self.status in ("queued", "in_progress")
        prompts, answers = (None, None) if self._raw is None or unfinished else self._raw.complete()
        return ResponseObject(
            id=self.id,
            created_at=self.prepared.head.created,
            completed_at=self._completed_at,
            status=self.status,
            background=bool(body.background),
            error=self._error(),
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if self.status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata or {},
            model=self.prepared.head.model,
            output=[] if unfinished else self._writer.items,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning={"effort": None, "summary": None, **(body.reasoning.model_dump() if body.reasoning else {})},
            store=body.is_stored and self.unstored_reason is None,
            temperature=params.temperature,
            text=_text(body),
            tool_choice="auto" if body.tool_choice is None else _json(body.tool_choice),
            tools=[_tool_json(tool) for tool in body.tools or ()],
            top_logprobs=body.top_logprobs or 0,
            top_p=params.top_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            truncation=body.truncation or "disabled",
            usage=None if unfinished else self._usage(),
            metrics=None if unfinished else self._metrics(),
            user=body.user,
            input_messages=prompts,
            output_messages=answers,
            kv_transfer_params=answer_params(self._held_blocks),
        )

    def _event(self, event: Event) -> Event:
        numbered = {**event, "sequence_number": len(self.events)}
        if "item" in numbered:  # a copy, as the item changes after the event
            numbered["item"] = dict(numbered["item"])
        self.events.append(numbered)
        return numbered

    def _error(self) -> ResponseFailure | None:
        if self.status != "failed":
            return None
        return ResponseFailure(
            code="server_error", message=str(self.failure or self.unstored_reason or "The generation was aborted.")
        )

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        return self.prepared.formatter.chat(entries) if entries else []

    def _metrics(self) -> RequestMetrics | None:
        """Timings of all turns together, if they are wanted."""
        times = [timing for counter in self._usage_counters for timing in counter.times]
        if not self.prepared.body.return_metrics or not times:
            return None
        return request_metrics(times, sum(counter.completion for counter in self._usage_counters))

    def _usage(self) -> ResponseUsage:
        usages = [counter.usage() for counter in self._usage_counters]
        prompt, completion = sum(turn.prompt_tokens for turn in usages), sum(turn.completion_tokens for turn in usages)
        cached = sum(turn.prompt_tokens_details.cached_tokens for turn in usages)
        reasoning = sum(turn.completion_tokens_details.reasoning_tokens for turn in usages)
        return ResponseUsage(
            input_tokens=prompt,
            input_tokens_details=InputTokensDetails(cached_tokens=cached),
            output_tokens=completion,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning),
            total_tokens=prompt + completion,
        )


class EventLog:
    """Give the events of a response to any number of readers, from any sequence number on, until there are no more."""

    def __init__(self, events: list[Event]) -> None:
        """Read the events so far, and those that are added to the list, once `notify` was called."""
        self._events = events
        self._count = len(events)
        self._more = asyncio.Event()
        self._ended = False

    def notify(self, *, last: bool = False) -> None:
        """Wake the readers: events were added. `last`: no more will follow."""
        self._ended = self._ended or last
        self._count = len(self._events)
        self._more.set()
        self._more = asyncio.Event()

    async def read(self, after: int) -> AsyncGenerator[Event, None]:
        """Events with sequence numbers above `after`."""
        index = after + 1
        while True:
            more = self._more
            while index < self._count:
                yield self._events[index]
                index += 1
            if self._ended:
                return
            await more.wait()
            await take_turn()  # there may be hundreds of readers


def _event_status(status: Status) -> str:
    """The status in the name of the last event. OpenAI's API has no event for cancelled responses."""
    return "failed" if status == "cancelled" else status


def _text(body: ResponsesRequest) -> dict[str, Any]:
    config = _json(body.text) if body.text is not None else {}
    return {"verbosity": "medium", **config, "format": config.get("format") or {"type": "text"}}


def _json(value: Any) -> Any:
    return value if isinstance(value, str) else value.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _tool_json(tool: AnyTool) -> dict[str, Any]:
    """A tool as it is returned and stored: without the client's credentials for MCP servers."""
    fields: dict[str, Any] = _json(tool)
    if isinstance(tool, McpTool):
        return {name: value for name, value in fields.items() if name not in ("headers", "authorization")}
    return fields


def with_ids(items: Sequence[Any], ids: Iterator[str]) -> list[dict[str, Any]]:
    """Items as JSON, each with an id."""
    fields = [{name: value for name, value in _json(item).items() if value is not None} for item in items]
    return [{"id": next(ids), **values, "type": item.type} for values, item in zip(fields, items, strict=True)]
