"""One response on its way: from a request to its events and, in the end, its whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from quire.api.chat.prepare import ChatCall
from quire.api.protocol.mcp import McpTool
from quire.api.protocol.responses import (
    AnyTool,
    Incomplete,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseFailure,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    Status,
)
from quire.api.responses.mcp_tools import BuiltInTools
from quire.api.responses.turns import Allowance
from quire.api.responses.writer import Event, ItemWriter
from quire.api.serving.generation import Tally, run
from quire.engine.wire.errors import DeadlineExceeded, EngineError
from quire.engine.wire.protocol import TokenLogprobs

CLIENT_CALLS = ("function_call", "custom_tool_call")  # items, after which it is the client's turn
_ENDS: dict[str | None, Status] = {"length": "incomplete", "abort": "failed", "error": "failed"}


@dataclass(slots=True)
class ResponseRun:
    """A response that is being generated.

    Attributes:
        call: its first turn.
        items: its own input, as it will be stored.
        tools: that are called here.
        lists: labels and tools of the servers to tell of, before all else.
        again: makes the next turn's call, given all output so far and where in it the last turn begins; none if there
            is no room for it.
        events: all that was told so far; an event's number is its place.
        failure: what ended it, if that was an error.
        ended: its last event was made.
        saving: held while it is written down.
        forgotten: it was deleted, and is not to be written down again.
    """

    call: ChatCall
    body: ResponsesRequest
    items: Sequence[dict[str, Any]]
    tools: BuiltInTools
    lists: Sequence[tuple[str, list[dict[str, Any]]]]
    again: Callable[[list[dict[str, Any]], int], Awaitable[ChatCall | None]]
    status: Status = "queued"
    events: list[Event] = field(default_factory=list)
    failure: EngineError | None = None
    ended: bool = False
    saving: asyncio.Lock = field(default_factory=asyncio.Lock)
    forgotten: bool = False
    _came: Status = "completed"  # of the last turn
    _completed: int | None = None
    _writer: ItemWriter = field(init=False)
    _tallies: list[Tally] = field(default_factory=list)  # of the turns

    def __post_init__(self) -> None:
        seal = "reasoning.encrypted_content" in (self.body.include or ())
        self._writer = ItemWriter(reasoning=self.body.include_reasoning, seal=seal, servers=self.tools.labels)

    @property
    def id(self) -> str:
        """The response's."""
        return self.call.head.id

    async def generate(self) -> AsyncGenerator[Event, None]:
        """All events but the last one, which `end` gives."""
        self.status = "in_progress"
        for kind in ("created", "in_progress"):
            yield self._event({"type": f"response.{kind}", "response": self.told()})
        for label, tools in self.lists:
            for event in self._writer.listed(label, tools):
                yield self._event(event)
        allowance = Allowance(self.call.requests[0].timeout, self.body.max_output_tokens)
        call: ChatCall | None = self.call
        while call is not None:
            begun = len(self._writer.items)
            try:
                async with aclosing(self._turn(call)) as events:
                    async for event in events:
                        yield event
            except DeadlineExceeded as error:  # which names the seconds that this turn had
                raise allowance.late() from error
            told, calls = self.tools.refused, self._writer.pending()
            async with aclosing(self._carried_out(calls, allowance)) as events:
                async for event in events:
                    yield event
            own = any(item["type"] in CLIENT_CALLS for item in self._writer.items[begun:])
            ends = not calls or own or told or self._came != "completed"
            call = None if ends else await self._next(allowance, begun)
        self.status = self._came

    async def _turn(self, call: ChatCall) -> AsyncGenerator[Event, None]:
        """The model's next words, up to a call or the end."""
        parser, counter, tally = call.reading.parser(), call.counter(), call.tally()
        self._tallies.append(tally)
        async with aclosing(run(call.model.client, call.requests)) as deltas:
            async for _, delta in deltas:
                tally.add(0, delta)
                reasoned = counter.count(delta.token_ids)
                tally.reasoning += reasoned
                parsed = parser.push(delta.text, last=delta.finish_reason is not None)
                for event in self._writer.write(parsed, self._logprobs(delta.logprobs[reasoned:])):
                    yield self._event(event)
                if delta.finish_reason is not None:
                    self._came = _ENDS.get(delta.finish_reason, "completed")
        for event in self._writer.end("incomplete" if self._came == "incomplete" else "completed"):
            yield self._event(event)
        if self._came != "completed":
            for event in self._writer.not_made():
                yield self._event(event)

    async def _carried_out(self, calls: Sequence[dict[str, Any]], allowance: Allowance) -> AsyncGenerator[Event, None]:
        """Events of calls of built-in tools."""
        async with aclosing(self.tools.carry_out(calls, allowance, self.call.model.client)) as outcomes:
            async for item, outcome in outcomes:
                for event in self._writer.made(item, outcome):
                    yield self._event(event)

    async def _next(self, allowance: Allowance, begun: int) -> ChatCall | None:
        """The next turn's call; the response is incomplete if there is nothing left for it."""
        used = sum(tally.completion for tally in self._tallies)
        call = await self.again(self._writer.items, begun) if allowance.tokens_left(used) else None
        if call is None:
            self._came = "incomplete"
            return None
        return allowance.applied(call, used)

    def end(self, status: Status | None = None, failure: EngineError | None = None) -> Event:
        """The last event; `status` if the answer did not come to its own end."""
        self.status = status or self.status
        self.failure = failure
        self.ended = True
        self._writer.break_off()
        if self.status == "completed":
            self._completed = int(time.time())
        return self._event({"type": f"response.{_said(self.status)}", "response": self.told()})

    def told(self) -> dict[str, Any]:
        """The response as it is now, as JSON."""
        return self.response().model_dump(mode="json")

    def response(self) -> ResponseObject:
        """The response as it is now."""
        body, params = self.body, self.call.requests[0].params
        unfinished = self.status in ("queued", "in_progress")
        return ResponseObject(
            id=self.id,
            created_at=self.call.head.created,
            completed_at=self._completed,
            status=self.status,
            background=bool(body.background),
            error=self._error(),
            incomplete_details=Incomplete(reason="max_output_tokens") if self.status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata or {},
            model=self.call.head.model,
            output=[] if unfinished else self._writer.items,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning={"effort": None, "summary": None, **(body.reasoning.model_dump() if body.reasoning else {})},
            store=body.kept,
            temperature=params.temperature,
            text=_text(body),
            tool_choice="auto" if body.tool_choice is None else _plain(body.tool_choice),
            tools=[_told(tool) for tool in body.tools or ()],
            top_logprobs=body.top_logprobs or 0,
            top_p=params.top_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            truncation=body.truncation or "disabled",
            usage=None if unfinished else self._usage(),
            user=body.user,
        )

    def _event(self, event: Event) -> Event:
        numbered = {**event, "sequence_number": len(self.events)}
        if "item" in numbered:  # which goes on growing
            numbered["item"] = dict(numbered["item"])
        self.events.append(numbered)
        return numbered

    def _error(self) -> ResponseFailure | None:
        if self.status != "failed":
            return None
        return ResponseFailure(code="server_error", message=str(self.failure or "The answer broke off."))

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        return self.call.formatter.chat(entries) if entries else []

    def _usage(self) -> ResponseUsage:
        usages = [tally.usage() for tally in self._tallies]
        given, made = sum(one.prompt_tokens for one in usages), sum(one.completion_tokens for one in usages)
        cached = sum(one.prompt_tokens_details.cached_tokens for one in usages)
        reasoned = sum(one.completion_tokens_details.reasoning_tokens for one in usages)
        return ResponseUsage(
            input_tokens=given,
            input_tokens_details=InputTokensDetails(cached_tokens=cached),
            output_tokens=made,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoned),
            total_tokens=given + made,
        )


class Following:
    """Hands events to any number of readers, each from a place of its own, until there are no more."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self._more = asyncio.Event()
        self._ended = False

    def tell(self, *, last: bool = False) -> None:
        """There are more events, or there will be none any more."""
        self._ended = self._ended or last
        self._more.set()
        self._more = asyncio.Event()

    async def read(self, after: int) -> AsyncGenerator[Event, None]:
        """The events behind one."""
        at = after + 1
        while True:
            more = self._more
            while at < len(self._events):
                yield self._events[at]
                at += 1
            if self._ended:
                return
            await more.wait()


def _said(status: Status) -> str:
    """OpenAI has no event for what was cancelled; its clients end at any of these."""
    return "failed" if status == "cancelled" else status


def _text(body: ResponsesRequest) -> dict[str, Any]:
    given = _plain(body.text) if body.text is not None else {}
    return {"verbosity": "medium", **given, "format": given.get("format") or {"type": "text"}}


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) else value.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _told(tool: AnyTool) -> dict[str, Any]:
    """A tool as it is told and stored: without what a client gave to be let in elsewhere."""
    told: dict[str, Any] = _plain(tool)
    if isinstance(tool, McpTool):
        return {name: value for name, value in told.items() if name not in ("headers", "authorization")}
    return told


def numbered(items: Sequence[Any], ids: Iterator[str]) -> list[dict[str, Any]]:
    """Items as they are stored, each with an id."""
    given = [{name: value for name, value in _plain(item).items() if value is not None} for item in items]
    return [{"id": next(ids), **one, "type": item.type} for one, item in zip(given, items, strict=True)]
