"""Responses that outlive their requests, in a database.

Calls block; they are made in worker threads. SQLAlchemy is imported by the first of them, as that takes a while.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

if TYPE_CHECKING:
    from quire.api.responses.database import Database

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Stored:
    """What is kept of a response.

    Attributes:
        response: the object, as it was last told.
        items: its own input, without what came before it.
        events: all events so far, if it may be streamed again.
        lease: until when (Unix time) somebody is at work on it.
    """

    response: dict[str, Any]
    items: list[dict[str, Any]]
    events: list[dict[str, Any]] | None = None
    lease: float = 0.0

    @property
    def id(self) -> str:
        """The response's."""
        return str(self.response["id"])


class ResponseStore:
    """Keeps responses for a while."""

    def __init__(self, url: str | None, ttl: float) -> None:
        """What it is made of.

        Args:
            url: as SQLAlchemy has them; none for the usual place.
            ttl: seconds from a response's creation to its end; 0: never.
        """
        self._url = url
        self._ttl = ttl
        self._opening = threading.Lock()
        self._database: Database | None = None

    async def save(self, stored: Stored) -> None:
        """Write a response down, in place of what it was.

        Raises:
            StoreFailed: the database did not take it.
        """
        created = float(stored.response["created_at"])
        row = {
            "id": stored.id,
            "expires": created + self._ttl if self._ttl else None,
            "lease": stored.lease,
            "response": orjson.dumps(stored.response),
            "items": orjson.dumps(stored.items),
            "events": None if stored.events is None else orjson.dumps(stored.events),
        }
        await self._run(lambda database: database.put(row, time.time()))

    async def load(self, response_id: str) -> Stored | None:
        """A response, if it is known and has not expired.

        Raises:
            StoreFailed: the database did not answer.
        """
        row = await self._run(lambda database: database.get(response_id, time.time()))
        if row is None:
            return None
        return Stored(
            response=orjson.loads(row["response"]),
            items=orjson.loads(row["items"]),
            events=None if row["events"] is None else orjson.loads(row["events"]),
            lease=row["lease"],
        )

    async def delete(self, response_id: str) -> bool:
        """Forget a response; gives whether it was known.

        Raises:
            StoreFailed: the database did not answer.
        """
        return await self._run(lambda database: database.delete(response_id))

    async def open(self) -> None:
        """Make sure that the database is there.

        Raises:
            StoreFailed: it is not.
        """
        await self._run(lambda _: None)

    async def _run(self, work: Callable[[Database], T]) -> T:
        return await asyncio.to_thread(lambda: work(self._opened()))

    def _opened(self) -> Database:
        from quire.api.responses.database import Database  # noqa: PLC0415 see above

        with self._opening:
            if self._database is None:
                self._database = Database(self._url or _usual_url())
            return self._database


def _usual_url() -> str:
    """A file in the user's state folder; memory, if nothing can be written there."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = state / "quire"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        logger.warning("stored responses live in memory only: %s cannot be written (see --response-store)", folder)
        return "sqlite://"
    return f"sqlite:///{folder / 'responses.db'}"
