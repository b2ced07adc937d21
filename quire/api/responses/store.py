"""The store of responses: a database that is used from worker threads, as its calls block.

SQLAlchemy is imported by the first call, because that is slow.
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
    """A stored response.

    Attributes:
        response: the response object in its last state.
        items: its own input, without that of responses before it.
        events: all events so far; None if it cannot be streamed again.
        lease: Unix time until which a server is generating it.
    """

    response: dict[str, Any]
    items: list[dict[str, Any]]
    events: list[dict[str, Any]] | None = None
    lease: float = 0.0

    @property
    def id(self) -> str:
        """Id of the response."""
        return str(self.response["id"])


class ResponseStore:
    """Stores responses until they expire."""

    def __init__(self, url: str | None, ttl: float) -> None:
        """Make a store. The database is opened by the first call.

        Args:
            url: of SQLAlchemy; None for the default location.
            ttl: seconds after which a response expires; 0: never.
        """
        self._url = url
        self._ttl = ttl
        self._open_lock = threading.Lock()
        self._database: Database | None = None

    async def save(self, stored: Stored) -> None:
        """Store a response, replacing its earlier state.

        Raises:
            StoreFailed: the database cannot be used.
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
        """A response; None if it is not stored or has expired.

        Raises:
            StoreFailed: the database cannot be used.
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
        """Delete a response; returns whether it was stored.

        Raises:
            StoreFailed: the database cannot be used.
        """
        return await self._run(lambda database: database.delete(response_id))

    async def open(self) -> None:
        """Open the database.

        Raises:
            StoreFailed: it cannot be opened.
        """
        await self._run(lambda _: None)

    async def aclose(self) -> None:
        """Close the database, if it was opened."""
        if self._database is not None:
            await asyncio.to_thread(self._database.close)

    async def _run(self, work: Callable[[Database], T]) -> T:
        return await asyncio.to_thread(lambda: work(self._opened()))

    def _opened(self) -> Database:
        from quire.api.responses.database import Database  # noqa: PLC0415 slow

        with self._open_lock:
            if self._database is None:
                self._database = Database(self._url or _default_url())
            return self._database


def _default_url() -> str:
    """A SQLite file in the user's state directory; in-memory SQLite if that is not writable."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = state / "quire"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        logger.warning("responses are stored in memory only, as %s is not writable (see --response-store)", folder)
        return "sqlite://"
    return f"sqlite:///{folder / 'responses.db'}"
