"""What happens to responses: made at once or in the background, remembered, streamed again, cancelled, forgotten."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from quire.api import fields
from quire.api.call import ChatCall, prepare_chat
from quire.api.errors import ApiError, InvalidRequest
from quire.api.generation import admit
from quire.api.identity import answer_id
from quire.api.protocol.responses import InputMessage, ResponsesRequest, ResponseTool
from quire.api.responses.errors import NoSuchResponse, StoreFailed
from quire.api.responses.run import Following, ResponseRun, numbered
from quire.api.responses.store import ResponseStore, Stored
from quire.api.responses.translation import as_chat, input_items, stored_items
from quire.api.responses.writer import Event, new_id
from quire.api.served import Services
from quire.engine.wire.errors import EngineError
from quire.multimodal.errors import PromptError

logger = logging.getLogger(__name__)
_LEASE = 60.0  # seconds for which one says that one is at work
_MOST_TURNS = 10_000  # responses in a row
_KINDS = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
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

    def __init__(self, services: Services, store: ResponseStore) -> None:
        self._services = services
        self._store = store
        self._jobs: dict[str, _Job] = {}

    async def admit(self, body: ResponsesRequest, request: Request) -> Admitted:
        """Check a request and take a place for it.

        Raises:
            ApiError: it cannot be answered, or not now.
        """
        if body.background and not body.store:
            raise InvalidRequest("background can only be used when `store` is true", "background")
        own = input_items(body)
        before = await self._conversation(body.previous_response_id)
        response_id = answer_id("resp", request, body.request_id).replace("-", "_", 1)
        call = await self._prepared(body, [*before, *own], response_id)
        headers = fields.judge(body, strict=self._services.strict_fields, unread=_unread(body, call))
        items = numbered(own, (new_id(_KINDS[item.type]) for item in own))
        return Admitted(ResponseRun(call, body, items), headers, admit(call.model.client, 1, "input"))

    async def events(self, run: ResponseRun) -> AsyncGenerator[Event, None]:
        """All events of a response, which is stored before the last of them is told.

        An engine's error ends it with an event; whoever closes this early has cancelled it.
        """
        last: Event | None = None
        try:
            try:
                async with aclosing(run.generate()) as events:
                    async for event in events:
                        yield event
                last = run.end()
            except EngineError as error:
                last = run.end("failed", error)
        finally:
            if last is None:
                run.end("cancelled")
            if run.body.store:
                await self._save(run)
        assert last is not None
        yield last

    async def whole(self, run: ResponseRun) -> dict[str, Any]:
        """A response at its end.

        Raises:
            EngineError: it did not come to one.
        """
        async with aclosing(self.events(run)) as events:
            async for _ in events:
                pass
        if run.failure is not None:
            raise run.failure
        return run.told()

    async def start(self, admitted: Admitted) -> Following:
        """Generate a response in the background."""
        run = admitted.run
        following = Following(run.events)
        await self._save(run, lease=time.time() + _LEASE)
        task = asyncio.create_task(self._work(run, following))

        def done(_: object) -> None:
            admitted.free()
            following.tell(last=True)
            del self._jobs[run.id]

        task.add_done_callback(done)
        self._jobs[run.id] = _Job(run, following, task)
        return following

    async def stored(self, response_id: str) -> Stored:
        """A response, whole or on its way.

        Raises:
            NoSuchResponse: it is not known.
        """
        stored = await self._store.load(response_id)
        if stored is None:
            raise NoSuchResponse(response_id)
        job = self._jobs.get(response_id)
        if job is not None:
            stored.response, stored.events = job.run.told(), job.run.events
        elif stored.response["status"] in ("queued", "in_progress") and stored.lease < time.time():
            stored.response["status"] = "failed"
            stored.response["error"] = {"code": "server_error", "message": "The server stopped while it was generated."}
        return stored

    async def replay(self, response_id: str, after: int) -> AsyncGenerator[Event, None]:
        """The events of a response behind one; those that are still to come as well.

        Raises:
            NoSuchResponse: it is not known.
            InvalidRequest: its events were not kept.
        """
        stored = await self.stored(response_id)
        job = self._jobs.get(response_id)
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
        stored = await self.stored(response_id)
        job = self._jobs.get(response_id)
        if job is not None:
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
        job.task.cancel()
        with suppress(asyncio.CancelledError):
            await job.task
        if job.run.status == "queued":  # it had not begun to run
            job.run.end("cancelled")
            await self._save(job.run)

    async def _work(self, run: ResponseRun, following: Following) -> None:
        """Body of a job."""
        renewing = asyncio.create_task(self._renew(run))
        try:
            async with aclosing(self.events(run)) as events:
                async for _ in events:
                    following.tell()
        except ApiError:
            logger.exception("response %s was not stored", run.id)
        finally:
            renewing.cancel()

    async def _renew(self, run: ResponseRun) -> None:
        while True:
            await asyncio.sleep(_LEASE / 3)
            with suppress(StoreFailed):
                await self._save(run, lease=time.time() + _LEASE)

    async def _save(self, run: ResponseRun, lease: float = 0.0) -> None:
        kept = run.events if run.body.stream or run.body.background else None
        await self._store.save(Stored(response=run.told(), items=list(run.items), events=kept, lease=lease))

    async def _conversation(self, response_id: str | None) -> list[Any]:
        return stored_items(await self._items(response_id))

    async def _items(self, response_id: str | None) -> list[dict[str, Any]]:
        """Input and output of a response and all before it."""
        turns: list[list[dict[str, Any]]] = []
        while response_id is not None and len(turns) < _MOST_TURNS:
            stored = await self._store.load(response_id)
            if stored is None:
                raise NoSuchResponse(response_id, "previous_response_id")
            if stored.response["status"] in ("queued", "in_progress"):
                raise InvalidRequest(f"Response '{response_id}' is not finished.", "previous_response_id")
            turns.append([*stored.items, *stored.response["output"]])
            response_id = stored.response["previous_response_id"]
        return [item for turn in reversed(turns) for item in turn]

    async def _prepared(self, body: ResponsesRequest, items: Sequence[Any], response_id: str) -> ChatCall:
        """The request, rendered; with truncation without its oldest items, as far as it has to be."""
        kept = list(items)
        while True:
            try:
                return await prepare_chat(as_chat(body, kept), self._services, response_id)
            except (InvalidRequest, PromptError) as error:
                shorter = _without_oldest(kept) if body.truncation == "auto" and error.param in _TOO_LONG else kept
                if len(shorter) == len(kept):
                    raise
                kept = shorter


def _without_oldest(items: list[Any]) -> list[Any]:
    """Without the first item that is no instruction, and the results of what it called; the last one always stays."""
    for place, item in enumerate(items[:-1]):
        if isinstance(item, InputMessage) and item.role in ("system", "developer"):
            continue
        rest = items[:place] + items[place + 1 :]
        gone = item.call_id if item.type == "function_call" else None
        return [one for one in rest if not (one.type == "function_call_output" and one.call_id == gone)]
    return items


def _unread(body: ResponsesRequest, call: ChatCall) -> list[str]:
    """Names of what was given and has no effect."""
    names = [{"chat_template_kwargs.reasoning_effort": "reasoning.effort"}.get(name, name) for name in call.unread]
    names += [_tool_name(place, tool) for place, tool in enumerate(body.tools or ()) if tool.type != "function"]
    if body.reasoning is not None:
        names += [f"reasoning.{name}" for name in ("summary", "generate_summary") if getattr(body.reasoning, name)]
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        names.append("text.verbosity")
    return names


def _tool_name(place: int, tool: ResponseTool) -> str:
    return f"tools.{place} ({tool.type})"
