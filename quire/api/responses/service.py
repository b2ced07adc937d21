"""What happens to responses: made at once or in the background, remembered, streamed again, cancelled, forgotten."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import orjson

from quire.api.chat.prepare import ChatCall, prepare_chat
from quire.api.http import fields
from quire.api.http.errors import InvalidRequest
from quire.api.mcp.servers import ToolServers
from quire.api.protocol.responses import InputMessage, ResponseObject, ResponsesRequest
from quire.api.responses.errors import NoSuchResponse, StoreFailed
from quire.api.responses.mcp_tools import BuiltInTools, later, named_servers, plain_turn
from quire.api.responses.run import CLIENT_CALLS, Following, ResponseRun, numbered
from quire.api.responses.store import ResponseStore, Stored
from quire.api.responses.translation import as_chat, input_items, stored_items
from quire.api.responses.writer import Event, new_id
from quire.api.serving.generation import admit
from quire.api.serving.models import Services
from quire.engine.wire.errors import EngineError
from quire.multimodal.errors import PromptError

logger = logging.getLogger(__name__)
_LEASE = 60.0  # seconds for which one says that one is at work
_UNFINISHED = ("queued", "in_progress")
_KINDS = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
}
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_SERVED = ("function", "custom", "mcp")  # kinds of tools
_TOO_LONG = ("input_tokens", "input_text", "max_tokens")


@dataclass(frozen=True, slots=True)
class Admitted:
    """A checked request with a place in the engine.

    Attributes:
        headers: of its answer.
        free: gives the place back.
    """

    run: ResponseRun
    headers: dict[str, str]
    free: Callable[[], None]


@dataclass(slots=True)
class _Job:
    """A response in the background."""

    run: ResponseRun
    following: Following
    task: asyncio.Task[None]


class ResponseService:
    """Makes responses and keeps them."""

    def __init__(self, services: Services, store: ResponseStore, tool_servers: ToolServers) -> None:
        self._services = services
        self._store = store
        self._tool_servers = tool_servers
        self._jobs: dict[str, _Job] = {}

    async def admit(self, body: ResponsesRequest) -> Admitted:
        """Check a request and take a place for it.

        Raises:
            ApiError: it cannot be answered, or not now.
        """
        if body.background and not body.kept:
            raise InvalidRequest("background can only be used when `store` is true", "background")
        own = input_items(body)
        with _written_down():
            given = numbered(own, (new_id(_KINDS[item.type]) for item in own))
            orjson.dumps(given)
        items = [*await self._conversation(body.previous_response_id), *own]
        tools = BuiltInTools(await self._tool_servers.offered(named_servers(body)), body.max_tool_calls)
        asked = tools.request(body)
        # Not the request's id: whoever chose that of a stored response would replace it.
        call = await self._prepared(asked, items, new_id("resp"))
        headers = fields.judge(body, strict=self._services.strict_fields, unread=_unread(body, call))

        async def again(output: list[dict[str, Any]], begun: int) -> ChatCall | None:
            last = plain_turn(stored_items(output[begun:]))
            try:
                return await self._prepared(later(asked), [*items, *stored_items(output[:begun]), *last], call.head.id)
            except (InvalidRequest, PromptError) as error:
                if error.param not in _TOO_LONG:
                    raise
            return None

        run = ResponseRun(call, body, given, tools, list(tools.lists(items)), again)
        with _written_down():
            orjson.dumps(run.told())
        return Admitted(run, headers, admit(call.model.client, 1, "input"))

    async def events(self, run: ResponseRun) -> AsyncGenerator[Event, None]:
        """All events of a response, which is stored before the last of them is told.

        An engine's error ends it with an event; whoever closes this early has cancelled it.
        """
        try:
            try:
                async with aclosing(run.generate()) as events:
                    async for event in events:
                        yield event
                last = run.end()
            except EngineError as error:
                last = run.end("failed", error)
            except Exception:  # told as it is: the route answers it
                run.end("failed")
                raise
        finally:
            if not run.ended:
                run.end("cancelled")
            if run.body.kept:
                await asyncio.shield(self._save(run))
        yield last

    async def whole(self, run: ResponseRun) -> ResponseObject:
        """A response at its end.

        Raises:
            EngineError: it did not come to one.
        """
        async with aclosing(self.events(run)) as events:
            async for _ in events:
                pass
        if run.failure is not None:
            raise run.failure
        return run.response()

    async def start(self, admitted: Admitted) -> Following:
        """Generate a response in the background; whatever comes of it, its place is given back.

        Raises:
            StoreFailed: it cannot be kept, so it is not begun.
        """
        run = admitted.run
        following = Following(run.events)
        with ExitStack() as held:
            held.callback(admitted.free)
            await self._save(run)
            held.pop_all()
        task = asyncio.create_task(self._work(run, following))

        def done(_: object) -> None:
            admitted.free()
            following.tell(last=True)
            del self._jobs[run.id]

        task.add_done_callback(done)
        self._jobs[run.id] = _Job(run, following, task)
        return following

    async def drain(self) -> None:
        """Wait until nothing is made in the background any more."""
        while self._jobs:
            await asyncio.wait([job.task for job in self._jobs.values()])

    async def stored(self, response_id: str, param: str | None = None) -> Stored:
        """A response, whole or on its way; `param` is the field that names it.

        Raises:
            NoSuchResponse: it is not known.
        """
        job = self._jobs.get(response_id)  # before the wait, in which it may end
        stored = await self._store.load(response_id)
        if stored is None:
            raise NoSuchResponse(response_id, param)
        if job is not None:
            stored.response, stored.events = job.run.told(), job.run.events
        elif stored.response["status"] in _UNFINISHED and stored.lease < time.time():
            stored.response["status"] = "failed"
            stored.response["error"] = {"code": "server_error", "message": "The server stopped while it was generated."}
        return stored

    async def replay(self, response_id: str, after: int) -> AsyncGenerator[Event, None]:
        """The events of a response behind one; those that are still to come as well.

        Raises:
            NoSuchResponse: it is not known.
            InvalidRequest: its events were not kept.
        """
        job = self._jobs.get(response_id)
        stored = await self.stored(response_id)
        if job is not None:
            return job.following.read(after)
        if stored.events is None:
            raise InvalidRequest("Only responses made with `stream` or `background` can be streamed again.", "stream")
        finished = Following(stored.events)
        finished.tell(last=True)
        return finished.read(after)

    async def cancel(self, response_id: str) -> dict[str, Any]:
        """Stop a response in the background.

        Raises:
            NoSuchResponse: it is not known.
            InvalidRequest: it is not in the background, or has ended.
        """
        job = self._jobs.get(response_id)
        stored = await self.stored(response_id)
        if job is not None and not job.run.ended:
            await self._stop(job)
            return job.run.told()
        if stored.response["status"] == "cancelled":
            return stored.response
        if not stored.response["background"]:
            raise InvalidRequest("Cannot cancel a synchronous response.")
        raise InvalidRequest(f"Cannot cancel a response that is {stored.response['status']}.")

    async def delete(self, response_id: str) -> None:
        """Forget a response; one in the background is stopped first.

        Raises:
            NoSuchResponse: it is not known.
        """
        job = self._jobs.get(response_id)
        if job is not None:
            await self._stop(job)
            async with job.run.saving:
                job.run.forgotten = True
        if not await self._store.delete(response_id):
            raise NoSuchResponse(response_id)

    async def input_items(self, response_id: str) -> list[dict[str, Any]]:
        """What a response answered, what came before it included, oldest first.

        Raises:
            NoSuchResponse: it is not known.
        """
        stored = await self.stored(response_id)
        before = await self._items(stored.response["previous_response_id"])
        return [*before, *stored.items]

    async def _stop(self, job: _Job) -> None:
        if not job.task.cancelling():
            job.task.cancel()
        await asyncio.wait([job.task])
        if not job.run.ended:  # it had not begun to run
            job.run.end("cancelled")
            await self._save(job.run)

    async def _work(self, run: ResponseRun, following: Following) -> None:
        """Body of a job."""
        renewing = asyncio.create_task(self._renew(run))
        try:
            async with aclosing(self.events(run)) as events:
                async for _ in events:
                    following.tell()
        except Exception:  # the job's edge: nobody else would see it
            logger.exception("response %s failed", run.id)
        finally:
            renewing.cancel()

    async def _renew(self, run: ResponseRun) -> None:
        while not run.ended:
            await asyncio.sleep(_LEASE / 3)
            with suppress(StoreFailed):
                await self._save(run)

    async def _save(self, run: ResponseRun) -> None:
        """Write a response down as it is then; one after the other, so that what is older never comes last."""
        async with run.saving:
            if run.forgotten:
                return
            kept = run.events if run.body.stream or run.body.background else None
            lease = 0.0 if run.ended else time.time() + _LEASE
            await self._store.save(Stored(response=run.told(), items=list(run.items), events=kept, lease=lease))

    async def _conversation(self, response_id: str | None) -> list[Any]:
        return stored_items(await self._items(response_id))

    async def _items(self, response_id: str | None) -> list[dict[str, Any]]:
        """Input and output of a response and all before it."""
        turns: list[list[dict[str, Any]]] = []
        while response_id is not None:
            stored = await self.stored(response_id, "previous_response_id")
            if stored.response["status"] in _UNFINISHED:
                raise InvalidRequest(f"Response '{response_id}' is not finished.", "previous_response_id")
            turns.append([*stored.items, *stored.response["output"]])
            response_id = stored.response["previous_response_id"]
        return [item for turn in reversed(turns) for item in turn]

    async def _prepared(self, body: ResponsesRequest, items: Sequence[Any], response_id: str) -> ChatCall:
        """The request, rendered; with truncation without as few of its oldest items as it takes."""

        async def without(count: int) -> ChatCall:
            return await prepare_chat(as_chat(body, _without(items, count)), self._services, response_id)

        try:
            return await without(0)
        except (InvalidRequest, PromptError) as error:
            if body.truncation != "auto" or error.param not in _TOO_LONG:
                raise
        most = len(_droppable(items))
        found, too_few = await without(most), 0
        while most - too_few > 1:
            count = (most + too_few) // 2
            try:
                found, most = await without(count), count
            except (InvalidRequest, PromptError):
                too_few = count
        return found


@contextmanager
def _written_down() -> Iterator[None]:
    """What a client gave, it may have given deeper than can be written."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"The request cannot be written down: {error}", "input") from error


def _droppable(items: Sequence[Any]) -> list[int]:
    """Places of what may be left out: no instructions, nor the last item, nor the call that it is a result of."""
    if not items:
        return []
    needed = items[-1].call_id if items[-1].type in _OUTPUTS else None
    return [
        place
        for place, item in enumerate(items[:-1])
        if not (isinstance(item, InputMessage) and item.role in ("system", "developer"))
        and not (item.type in CLIENT_CALLS and item.call_id == needed)
    ]


def _without(items: Sequence[Any], count: int) -> list[Any]:
    """Without the first `count` that may be left out, and the results of calls among them."""
    if not count:
        return list(items)
    gone = set(_droppable(items)[:count])
    calls = {items[place].call_id for place in gone if items[place].type in CLIENT_CALLS}
    return [
        item
        for place, item in enumerate(items)
        if place not in gone and not (item.type in _OUTPUTS and item.call_id in calls)
    ]


def _unread(body: ResponsesRequest, call: ChatCall) -> list[str]:
    """Names of what was given and has no effect."""
    names = [{"chat_template_kwargs.reasoning_effort": "reasoning.effort"}.get(name, name) for name in call.unread]
    for place, tool in enumerate(body.tools or ()):
        if tool.type in _SERVED:
            names += [f"tools.{place}.{name}" for name in _extra(tool)]
        else:
            names.append(f"tools.{place} ({tool.type})")
    names += [f"text.{name}" for name in _extra(body.text)] + [f"reasoning.{name}" for name in _extra(body.reasoning)]
    if body.reasoning is not None:
        names += [f"reasoning.{name}" for name in ("summary", "generate_summary") if getattr(body.reasoning, name)]
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        names.append("text.verbosity")
    return names


def _extra(value: Any) -> Iterable[str]:
    """Undeclared fields of a part of the request."""
    return () if value is None else value.model_extra or ()
