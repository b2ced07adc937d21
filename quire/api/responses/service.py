"""Creates responses, in the foreground or the background, and stores, replays, cancels and deletes them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from quire.api.chat.prepare import PreparedChat
from quire.api.mcp.servers import ToolServers
from quire.api.responses.errors import NoSuchResponse, StoreFailed
from quire.api.responses.mcp_tools import (
    McpToolset,
    follow_up_request,
    mcp_servers_in,
    turn_as_function_calls,
    without_pictures,
)
from quire.api.responses.run import EventLog, ResponseRun, with_ids
from quire.api.responses.store import ResponseStore, StoredResponse
from quire.api.responses.translation import input_items, stored_items
from quire.api.responses.truncation import TOO_LONG, prepare_turn
from quire.api.responses.writer import Event, new_id
from quire.engine.client.errors import EngineError
from quire.engine.client.origin import current_origin
from quire.multimodal.errors import PromptError
from quire.protocol.errors import InvalidRequest
from quire.protocol.responses import ResponseObject, ResponsesRequest
from quire.serving.models import GeneratingModel, ServerState
from quire.workers.tenant import take_turn

T = TypeVar("T")
R = TypeVar("R")
logger = logging.getLogger(__name__)
_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
}
_SUPPORTED_TOOLS = ("function", "custom", "mcp")
LEASE_SECONDS = 60.0  # a response is considered abandoned if its server does not renew its lease
UNFINISHED = ("queued", "in_progress")
_SLICE = 256  # items: a few milliseconds of work


@dataclass(slots=True)
class _Job:
    """A response in the background."""

    run: ResponseRun
    log: EventLog
    task: asyncio.Task[None]


class ResponseService:
    """Create and store responses."""

    def __init__(self, state: ServerState, store: ResponseStore, tool_servers: ToolServers) -> None:
        self._state = state
        self._store = store
        self._tool_servers = tool_servers
        self._jobs: dict[str, _Job] = {}
        state.degraded.append(store.problem)

    async def prepare(self, body: ResponsesRequest, model: GeneratingModel, owner: str) -> ResponseRun:
        """Check a request and render its first turn. Its slot has been reserved. `owner`: see `owner_of`.

        Raises:
            ApiError: it cannot be answered.
        """
        if body.return_metrics is None:
            body.return_metrics = self._state.include_metrics
        new_items = input_items(body)
        new_json = await map_in_slices(new_items, _serialized)
        before = await self._conversation(body.previous_response_id, owner)
        items = [*await map_in_slices(before, stored_items), *new_items]
        tools = McpToolset(await self._tool_servers.offered_tools(mcp_servers_in(body)), body.max_tool_calls)
        request = tools.first_request(body)
        # Not the request's id: a client could choose that of a stored response, and replace it.
        prepared = await prepare_turn(request, items, model, self._state, new_id("resp"))
        current_origin().notes.answer_id = prepared.head.id

        async def prepare_next(output: list[dict[str, Any]], turn_start: int) -> PreparedChat | None:
            before = stored_items(output[:turn_start])
            last = turn_as_function_calls(stored_items(output[turn_start:]))
            try:
                return await prepare_turn(
                    follow_up_request(request), [*items, *before, *last], model, self._state, prepared.head.id
                )
            except (InvalidRequest, PromptError) as error:
                if error.param in TOO_LONG:
                    return None
                if not without_pictures(output[turn_start:], str(error)):
                    raise
            return await prepare_next(output, turn_start)

        run = ResponseRun(
            prepared,
            body,
            new_json,
            owner,
            tools,
            list(tools.new_lists(items)),
            prepare_next,
            _unused_fields(body, prepared),
        )
        with _refuse_unserialisable():
            orjson.dumps(run.to_json())
        return run

    async def events(self, run: ResponseRun) -> AsyncGenerator[Event, None]:
        """All events of a response. It is stored before its last event.

        An error of the engine ends it with an event. If it could not be stored, its last event says so. Closing the
        generator early cancels the response.
        """
        try:
            try:
                async with aclosing(run.generate()) as events:
                    async for event in events:
                        yield event
                last = run.finish()
            except EngineError as error:
                last = run.finish("failed", error)
            except Exception:  # the route responds with it
                run.finish("failed")
                raise
        finally:
            if not run.finished:
                run.finish("cancelled")
            if run.body.is_stored:
                await asyncio.shield(self._keep(run))
        yield last

    async def complete(self, run: ResponseRun) -> ResponseObject:
        """A response after its last event.

        Raises:
            EngineError: its generation failed.
        """
        async with aclosing(self.events(run)) as events:
            async for _ in events:
                pass
        if run.failure is not None:
            raise run.failure
        return run.response()

    async def start(self, run: ResponseRun, slots: ExitStack) -> EventLog:
        """Generate a response in the background. `slots` is closed when it has ended, or could not be started.

        Raises:
            StoreFailed: it cannot be stored, so it is not started.
        """
        log = EventLog(run.events)
        with slots:
            await self._save(run)
            slots = slots.pop_all()
        task = asyncio.create_task(self._run_job(run, log))

        def done(_: object) -> None:  # also of a task that was cancelled before it began to run
            slots.close()
            log.notify(last=True)
            del self._jobs[run.id]

        task.add_done_callback(done)
        self._jobs[run.id] = _Job(run, log, task)
        return log

    @property
    def running(self) -> int:
        """Number of responses in the background that have not ended."""
        return len(self._jobs)

    async def stored(self, response_id: str, owner: str, *, events: bool = False) -> StoredResponse:
        """A stored response, finished or not. `events`: with its events.

        Raises:
            NoSuchResponse: it is not stored, or belongs to another owner.
            StoreFailed: the store cannot be read.
        """
        job = self._job(response_id, owner)
        if job is not None:
            if job.run.finished:  # it is being stored: if that fails, it has failed
                await asyncio.wait([job.task])
            run = job.run
            return StoredResponse(owner=run.owner, response=run.to_json(), items=list(run.items), events=run.events)
        stored = await self._store.load(response_id, owner, events=events)
        if stored is None:
            raise NoSuchResponse(response_id)
        end_if_abandoned(stored)
        return stored

    async def replay(self, response_id: str, owner: str, after: int) -> AsyncGenerator[Event, None]:
        """The events of a response with sequence numbers above `after`, including those that are still to come.

        Raises:
            NoSuchResponse: it is not stored.
            InvalidRequest: its events were not stored, or it has no event with the number `after`.
        """
        job = self._job(response_id, owner)
        stored = await self.stored(response_id, owner, events=True)
        if stored.events is None:
            raise InvalidRequest(
                "Only responses that were created with `stream` or `background` can be replayed as a stream.", "stream"
            )
        if after >= len(stored.events):
            raise InvalidRequest(
                f"`starting_after` must be below {len(stored.events)}, the number of events so far.", "starting_after"
            )
        if job is not None:
            return job.log.read(after)
        log = EventLog(stored.events)
        log.notify(last=True)
        return log.read(after)

    async def cancel(self, response_id: str, owner: str) -> dict[str, Any]:
        """Cancel a response in the background.

        Raises:
            NoSuchResponse: it is not stored.
            InvalidRequest: it is not in the background, or has ended.
        """
        job = self._job(response_id, owner)
        stored = await self.stored(response_id, owner)
        if job is not None and not job.run.finished:
            await self._cancel_job(job)
            return job.run.to_json()
        if stored.response["status"] == "cancelled":
            return stored.response
        if not stored.response["background"]:
            raise InvalidRequest("Cannot cancel a synchronous response.")
        raise InvalidRequest(f"Cannot cancel a response that is {stored.response['status']}.")

    async def delete(self, response_id: str, owner: str) -> None:
        """Delete a response; one in the background is cancelled first.

        Raises:
            NoSuchResponse: it is not stored.
        """
        job = self._job(response_id, owner)
        if job is not None:
            await self._cancel_job(job)
            async with job.run.save_lock:
                job.run.deleted = True
        if not await self._store.delete(response_id, owner) and job is None:
            raise NoSuchResponse(response_id)

    async def input_items(self, response_id: str, owner: str) -> list[dict[str, Any]]:
        """The input of a response and of all responses before it, oldest first. No two of them have the same id.

        Raises:
            NoSuchResponse: it, or a response before it, is not stored.
            InvalidRequest: the conversation is too long.
        """
        stored = await self.stored(response_id, owner)
        before = await self._conversation(stored.response["previous_response_id"], owner)
        return await map_in_slices([*before, *stored.items], with_unique_ids())

    def _job(self, response_id: str, owner: str) -> _Job | None:
        """The job of an owner's response in the background."""
        job = self._jobs.get(response_id)
        return job if job is not None and job.run.owner in (owner, "") else None

    async def _cancel_job(self, job: _Job) -> None:
        if not job.task.cancelling():
            job.task.cancel()
        await asyncio.wait([job.task])
        if not job.run.finished:  # the task had not begun to run
            job.run.finish("cancelled")
            await self._keep(job.run)

    async def _run_job(self, run: ResponseRun, log: EventLog) -> None:
        renewal = asyncio.create_task(self._renew_lease(run))
        try:
            async with aclosing(self.events(run)) as events:
                async for _ in events:
                    log.notify()
        except Exception:  # nothing else would report it
            logger.exception("response %s failed", run.id)
        finally:
            renewal.cancel()

    async def _renew_lease(self, run: ResponseRun) -> None:
        while not run.finished:
            await asyncio.sleep(LEASE_SECONDS / 3)
            with suppress(StoreFailed):
                await self._save(run)

    async def _keep(self, run: ResponseRun) -> None:
        """Store a response that has ended. If that fails, the response says so; one in the background fails."""
        try:
            await self._save(run)
        except StoreFailed as error:
            logger.warning("response %s was not stored: %s %s", run.id, error.message, error.detail)
            run.mark_unstored(error.message)
            if run.body.background:  # its client has not got the answer; a failure takes less space than an answer
                with suppress(StoreFailed):
                    await self._save(run)

    async def _save(self, run: ResponseRun) -> None:
        """Store the current state of a response. The lock keeps an older state from replacing a newer one."""
        async with run.save_lock:
            if run.deleted:
                return
            await self._store.save(stored_state(run))

    async def _conversation(self, response_id: str | None, owner: str) -> list[dict[str, Any]]:
        """Input and output of a response and of all responses before it."""
        if response_id is None:
            return []
        items: list[dict[str, Any]] = []
        max_bytes = int(self._state.limits.max_body_size)
        for stored in await self._store.conversation(response_id, owner, max_bytes):
            end_if_abandoned(stored)
            if stored.response["status"] in UNFINISHED:
                raise InvalidRequest(f"Response '{stored.id}' is not finished.", "previous_response_id")
            items += [*stored.items, *stored.response["output"]]
        return items


def stored_state(run: ResponseRun) -> StoredResponse:
    """The state of a response, to be stored. After it could not be stored: only that."""
    response = run.events[-1]["response"] if run.finished else run.to_json()
    if run.unstored_reason is not None:
        return StoredResponse(owner=run.owner, response={**response, "output": []}, items=[])
    return StoredResponse(
        owner=run.owner,
        response=response,
        items=list(run.items),
        events=list(run.events) if run.body.stream or run.body.background else None,
        lease=0.0 if run.finished else time.time() + LEASE_SECONDS,
    )


def end_if_abandoned(stored: StoredResponse) -> None:
    """Mark a response as failed if no server generates it any more."""
    if stored.response["status"] not in UNFINISHED or stored.lease >= time.time():
        return
    message = "The server stopped while the response was generated, or could not store it."
    stored.response |= {"status": "failed", "error": {"code": "server_error", "message": message}}
    if stored.events is not None:
        number = len(stored.events)
        stored.events.append({"type": "response.failed", "response": stored.response, "sequence_number": number})


def with_unique_ids() -> Callable[[Sequence[dict[str, Any]]], Iterator[dict[str, Any]]]:
    """A function that gives ids that have occurred before a number, always the same, so that they can be cursors."""
    counts: Counter[str] = Counter()
    seen: set[str] = set()

    def number(items: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for item in items:
            item_id = unique = item["id"]
            counts[item_id] += 1
            while unique in seen:
                unique = f"{item_id}-{counts[item_id]}"
                counts[item_id] += 1
            seen.add(unique)
            yield item if unique == item_id else {**item, "id": unique}

    return number


async def map_in_slices(items: Sequence[T], work: Callable[[Sequence[T]], Iterable[R]]) -> list[R]:
    """The results of `work` for slices of the items, in one list. A short list is done at once."""
    results: list[R] = []
    for start in range(0, len(items), _SLICE):
        if len(items) > _SLICE:
            await take_turn()
        results.extend(work(items[start : start + _SLICE]))
    return results


def _serialized(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Items of the request as JSON, each with an id."""
    with _refuse_unserialisable():
        serialized = with_ids(items, (new_id(_ID_PREFIXES[item.type]) for item in items))
        for item in serialized:
            orjson.dumps(item)
    return serialized


@contextmanager
def _refuse_unserialisable() -> Iterator[None]:
    """Refuse requests that cannot be serialized as JSON, for example because they are nested too deeply."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"The request cannot be serialized as JSON: {error}", "input") from error


def _unused_fields(body: ResponsesRequest, prepared: PreparedChat) -> list[str]:
    """Names of fields that have no effect."""
    names = [
        {"chat_template_kwargs.reasoning_effort": "reasoning.effort"}.get(name, name) for name in prepared.unused_fields
    ]
    for index, tool in enumerate(body.tools or ()):
        if tool.type not in _SUPPORTED_TOOLS:
            names.append(f"tools[{index}] ({tool.type})")
    if body.reasoning is not None:
        names += [f"reasoning.{name}" for name in ("summary", "generate_summary") if getattr(body.reasoning, name)]
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        names.append("text.verbosity")
    return names
