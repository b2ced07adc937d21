"""The store of responses: rows of a database, encoded and decoded in worker threads.

SQLAlchemy is imported when the database is opened, because that is slow.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from quire.api.responses.errors import NoSuchResponse, StoreFailed
from quire.api.responses.sqlite_file import check_file
from quire.api.responses.worker import DatabaseWorker
from quire.protocol.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from quire.api.responses.database import Database

logger = logging.getLogger(__name__)

MAX_CONVERSATION = 2048  # responses
_IN_MEMORY = "sqlite://"
_FILE = "sqlite:///"  # followed by a path
_ID = re.compile(r"[A-Za-z0-9_-]{1,200}")


@dataclass(slots=True, kw_only=True)
class StoredResponse:
    """A stored response.

    Attributes:
        owner: the client that it belongs to; empty: everybody.
        response: the response object in its last state.
        items: input of the response itself, without that of responses before it.
        events: all events so far; None if it cannot be streamed again, or if they were not loaded.
        lease: Unix time until which a server is generating it.
    """

    owner: str
    response: dict[str, Any]
    items: list[dict[str, Any]]
    events: list[dict[str, Any]] | None = None
    lease: float = 0.0

    @property
    def id(self) -> str:
        """Id of the response."""
        return str(self.response["id"])


class ResponseStore:
    """Store responses until they expire, or until newer ones need their space.

    A response can be read, continued and deleted by its owner, and one without an owner by everybody. For all others it
    does not exist.
    """

    def __init__(self, url: str | None, ttl: float, size: int | None = None, share: float = 1.0) -> None:
        """Make a store. The database is opened by the first call.

        Args:
            url: URL in SQLAlchemy's format; None for the default location.
            ttl: seconds after which a response expires; 0: never.
            size: bytes of all responses together; None for 1 GiB, or 256 MiB in memory.
            share: of operations that may wait, for one client.
        """
        self._url = url
        self._ttl = ttl
        self._size = size
        self._worker = DatabaseWorker(self._open_database, share)

    def problem(self) -> str | None:
        """Return why the store cannot be used, as far as is known; None if it works."""
        return self._worker.problem

    async def save(self, stored: StoredResponse) -> None:
        """Store a response, replacing its earlier state. It must not change meanwhile.

        Raises:
            StoreFailed: the database cannot be used, or does not accept the response.
        """
        await self._worker.run(lambda database: database.put(self._row(stored)), write=True)

    async def load(self, response_id: str, owner: str, *, events: bool = False) -> StoredResponse | None:
        """A response; None if it is not stored for this owner or has expired. `events`: with its events.

        Raises:
            StoreFailed: the database cannot be used.
        """
        if not _ID.fullmatch(response_id):
            return None

        def read(database: Database) -> StoredResponse | None:
            row = database.get(response_id, owner, time.time(), events=events)
            return None if row is None else _stored(row)

        return await self._worker.run(read, write=False)

    async def conversation(self, response_id: str, owner: str, max_bytes: int) -> list[StoredResponse]:
        """A response and the responses before it, oldest first.

        Raises:
            NoSuchResponse: one of them is not stored.
            InvalidRequest: there are more than `MAX_CONVERSATION`, or they take more than `max_bytes`.
            StoreFailed: the database cannot be used.
        """
        reader = _ConversationReader(response_id, max_bytes)
        if not _ID.fullmatch(response_id):
            reader.add(None)
        await self._worker.run(
            lambda database: database.follow(response_id, owner, time.time(), reader.add), write=False
        )
        return reader.responses[::-1]

    async def delete(self, response_id: str, owner: str) -> bool:
        """Delete a response; returns whether it was stored.

        Raises:
            StoreFailed: the database cannot be used.
        """
        if not _ID.fullmatch(response_id):
            return False
        return await self._worker.run(lambda database: database.delete(response_id, owner), write=True)

    async def open(self) -> None:
        """Open the database, and check that it can be written. A file in the default location is only checked.

        Raises:
            StoreFailed: it cannot. The message names the database and is not meant for clients.
        """
        try:
            if self._url is not None:
                await self._worker.check()
            elif self._location != _IN_MEMORY:
                await asyncio.to_thread(check_file, Path(self._location.removeprefix(_FILE)))
        except StoreFailed as error:
            where = "in the default location" if self._url is None else "--response-store"
            raise StoreFailed(f"{error.message} ({where}: {self._shown_url()}) {error.detail}".rstrip()) from error

    def start_checks(self) -> None:
        """Open the database in the background, and check it again and again."""
        self._worker.start_maintenance()

    async def aclose(self) -> None:
        """Close the database, if it was opened. Waits for operations for a few seconds at most."""
        await self._worker.aclose()

    @cached_property
    def _location(self) -> str:
        """The URL of the database. The default is looked for once, as not finding it is logged."""
        return self._url or _default_url()

    def _open_database(self) -> Database:
        from quire.api.responses.database import Database  # noqa: PLC0415 slow

        return Database(self._location, self._size)

    def _shown_url(self) -> str:
        """The URL without its password."""
        return re.sub(r"(//[^/@]*):[^/@]*@", r"\1:***@", self._location)

    def _row(self, stored: StoredResponse) -> dict[str, Any]:
        from quire.api.responses.database import ROW_BYTES  # noqa: PLC0415 slow

        created = float(stored.response["created_at"])
        response = orjson.dumps(stored.response)
        items = _encode(stored.items)
        events = None if stored.events is None else _encode(stored.events)
        return {
            "id": stored.id,
            "owner": stored.owner,
            "expires": created + self._ttl if self._ttl else None,
            "lease": stored.lease,
            "response": response,
            "items": items,
            "events": events,
            "size": len(response) + len(items) + len(events or b"") + ROW_BYTES,
        }


class _ConversationReader:
    """Decode the rows of a conversation, newest first, within limits.

    Attributes:
        responses: the responses so far, the latest first.
    """

    def __init__(self, response_id: str, max_bytes: int) -> None:
        self.responses: list[StoredResponse] = []
        self._next_id = self._start = response_id
        self._max_bytes = self._bytes_left = max_bytes

    def add(self, row: dict[str, Any] | None) -> str | None:
        """Add a row; gives the id of the response before it."""
        if row is None:
            continued_by = self._start if self.responses else None
            raise NoSuchResponse(self._next_id, "previous_response_id", continued_by=continued_by)
        self._bytes_left -= len(row["response"]) + len(row["items"])
        if self._bytes_left < 0 or len(self.responses) == MAX_CONVERSATION:
            raise InvalidRequest(
                f"The conversation of `previous_response_id` is too long: it may have {MAX_CONVERSATION} responses and "
                f"{self._max_bytes} bytes (--max-body-size). Begin a new one, with its last items as `input`.",
                "previous_response_id",
            )
        self.responses.append(_stored(row))
        before: str | None = self.responses[-1].response["previous_response_id"]
        self._next_id = before or ""
        return before


def _stored(row: dict[str, Any]) -> StoredResponse:
    try:
        return StoredResponse(
            owner=row["owner"],
            response=orjson.loads(row["response"]),
            items=_decode(row["items"]),
            events=None if row.get("events") is None else _decode(row["events"]),
            lease=row["lease"],
        )
    except orjson.JSONDecodeError as error:
        raise Unavailable("The stored response is corrupt.") from error


def _encode(values: Iterable[Any]) -> bytes:
    """JSON lines. Other threads run between the values, but not while one is serialized."""
    return b"\n".join([orjson.dumps(value) for value in values])


def _decode(data: bytes) -> list[dict[str, Any]]:
    if data.startswith(b"["):  # as version 1 stored them
        values: list[dict[str, Any]] = orjson.loads(data)
        return values
    return [orjson.loads(line) for line in data.split(b"\n")] if data else []


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
        return _IN_MEMORY
    return f"{_FILE}{folder / 'responses.db'}"
