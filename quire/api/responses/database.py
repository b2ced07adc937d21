"""The table of stored responses, through SQLAlchemy."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from quire.api.responses.errors import StoreBlocked, StoreFailed, TooLargeToStore

T = TypeVar("T")

SCHEMA_VERSION = 2
ROW_BYTES = 300  # of a row besides its blobs: ids, numbers, its place in the indices
_FILE_BYTES, _MEMORY_BYTES = 1 << 30, 256 << 20  # default limits
LOCK_SECONDS = 5.0  # how long an operation waits for another writer of a SQLite file
_LOCK_STEP = 0.25  # seconds after which a waiting operation sees that the database is being closed
_BATCH = 100  # rows that one transaction deletes
_VACUUM_PAGES = 1000  # that one transaction returns to the file system
_FREE_PAGES = 256  # that stay in the file for the next responses
_MAX_LOG_FILE = 16 << 20  # bytes to which the write-ahead log is cut when it is reused
_PROBE_BYTES = 64 << 10  # that must be written before a failed database counts as working again

_metadata = sa.MetaData()
# Large enough for whole conversations; LargeBinary alone is 64 KiB in some databases.
_Blob = sa.LargeBinary(length=(1 << 32) - 1).with_variant(sa.LargeBinary(), "sqlite", "postgresql")
_responses = sa.Table(
    "quire_responses",
    _metadata,
    sa.Column("id", sa.String(200), primary_key=True),
    sa.Column("expires", sa.Double, index=True),
    sa.Column("lease", sa.Double, nullable=False),
    sa.Column("response", _Blob, nullable=False),
    sa.Column("items", _Blob, nullable=False),
    sa.Column("events", _Blob),
    sa.Column("stored", sa.Double, nullable=False, server_default=sa.text("0")),
    sa.Column("size", sa.BigInteger, nullable=False, server_default=sa.text("0")),
)
_age = sa.Index("quire_responses_age", _responses.c.stored, _responses.c.size)
_schema = sa.Table(
    "quire_store",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("probe", _Blob),
)
# By id, without and with events.
_QUERIES = {
    events: sa.select(*(column for column in _responses.c if events or column.name != "events")).where(
        _responses.c.id == sa.bindparam("wanted"),
        sa.or_(_responses.c.expires.is_(None), _responses.c.expires >= sa.bindparam("now")),
    )
    for events in (False, True)
}
_ADDED = (_responses.c.stored, _responses.c.size)  # in version 2
_LOCKED = "is locked by another process"
# What clients are told, by the beginning of SQLite's error names.
_PROBLEMS = {
    "SQLITE_BUSY": _LOCKED,
    "SQLITE_LOCKED": _LOCKED,
    "SQLITE_READONLY": "is read-only",
    "SQLITE_FULL": "has no space left",
    "SQLITE_CORRUPT": "is corrupt",
    "SQLITE_NOTADB": "is not a SQLite database",
    "SQLITE_IOERR": "cannot be read or written",
    "SQLITE_CANTOPEN": "cannot be opened",
}


class Database:
    """Rows by id, with a limit of their total size. Can be used from any thread.

    Every method raises StoreFailed if the database cannot be used.
    """

    def __init__(self, url: str, limit: int | None = None) -> None:
        """Connect, and create the tables, or update tables of an earlier version.

        Args:
            url: URL in SQLAlchemy's format.
            limit: bytes of all rows together; None for 1 GiB, or 256 MiB in memory. The oldest rows are deleted when it
                is reached.
        """
        self._used = 0  # bytes of all rows; other servers' rows are counted by `sweep`
        self._count_lock = threading.Lock()
        self._closing = False
        # By whether an operation writes.
        self._locks: dict[bool, AbstractContextManager[Any]] = {False: nullcontext(), True: nullcontext()}
        with _failing():
            parsed = sa.make_url(url)
            self._sqlite = parsed.get_backend_name() == "sqlite"
            self._engine = self._connect(parsed)
            self._engines = {write: self._engine.execution_options(quire_write=write) for write in (True, False)}
            in_memory = isinstance(self._engine.pool, StaticPool)
            self._limit = limit or (_MEMORY_BYTES if in_memory else _FILE_BYTES)
            named = self._sqlite and not in_memory and not str(parsed.database).startswith("file:")
            self._path = str(parsed.database) if named else None
        try:
            self._do(_create_tables, write=True)
            if self._sqlite:
                with suppress(StoreFailed):  # no space for it, or another server uses the file
                    self._do(_enable_vacuum, write=False)
            self._used = self._do(_total, write=False)
        except StoreFailed:
            self.close()
            raise
        self._file = self._file_identity()

    def close(self) -> None:
        """Close all connections. Operations that wait for a lock fail."""
        self._closing = True
        self._engine.dispose()

    def replaced(self) -> bool:
        """Whether its file was removed, or replaced by another, since it was opened."""
        return self._path is not None and self._file_identity() != self._file

    def check(self, *, write: bool) -> None:
        """Check that the tables can be read and locked. `write`: also that there is space."""

        def work(connection: sa.Connection) -> None:
            _check_version(connection.execute(sa.select(_schema.c.version)).scalar())
            if write:
                connection.execute(sa.update(_schema).values(probe=bytes(_PROBE_BYTES)))

        self._do(work, write=True)
        if write:
            self._do(lambda connection: connection.execute(sa.update(_schema).values(probe=None)), write=True)

    def put(self, row: Mapping[str, Any]) -> None:
        """Insert or replace a row. If the limit is reached, the oldest rows are deleted.

        Raises:
            TooLargeToStore: this row alone exceeds the limit.
        """
        if row["size"] > self._limit:
            raise TooLargeToStore(
                f"The response takes {row['size']} bytes, more than the limit of all stored responses together "
                f"({self._limit} bytes; --response-store-size)."
            )
        by_id = _responses.c.id == row["id"]

        def work(connection: sa.Connection) -> int:
            before = connection.execute(sa.select(_responses.c.size).where(by_id)).scalar()
            if before is None:
                connection.execute(sa.insert(_responses).values(**row, stored=time.time()))
            else:
                connection.execute(sa.update(_responses).where(by_id).values(**row))
            added: int = row["size"] - (before or 0)
            excess = self._used + added - self._limit
            while excess > 0 and (freed := _delete_oldest(connection, excess, row["id"])):
                added, excess = added - freed, excess - freed
            return added

        self._count(self._do(work, write=True))

    def get(self, response_id: str, now: float, *, events: bool) -> dict[str, Any] | None:
        """The row with this id, unless it has expired. `events`: with this column."""
        return self._do(lambda connection: _get(connection, response_id, now, events=events), write=False)

    def follow(self, response_id: str, now: float, next_id: Callable[[dict[str, Any] | None], str | None]) -> None:
        """Read a row, then those whose ids `next_id` gives for the row before, until it gives None."""

        def work(connection: sa.Connection) -> None:
            following: str | None = response_id
            while following is not None:
                following = next_id(_get(connection, following, now, events=False))

        self._do(work, write=False)

    def delete(self, response_id: str) -> bool:
        """Delete a row; returns whether it existed."""
        by_id = _responses.c.id == response_id

        def work(connection: sa.Connection) -> int | None:
            size: int | None = connection.execute(sa.select(_responses.c.size).where(by_id)).scalar()
            if size is not None:
                connection.execute(sa.delete(_responses).where(by_id))
            return size

        size = self._do(work, write=True)
        self._count(-(size or 0))
        return size is not None

    def sweep(self, now: float) -> bool:
        """Delete some expired rows, some of the oldest if there are too many, and shrink the file a little.

        Returns whether more of this is left to do.
        """

        def work(connection: sa.Connection) -> tuple[bool, int]:
            expired = _delete(connection, _responses.c.expires < now)
            used = _total(connection)
            if used > self._limit:
                used -= _delete_oldest(connection, used - self._limit)
            return expired, used

        more, used = self._do(work, write=True)
        with self._count_lock:
            self._used = used
        return (self._sqlite and self._do(_vacuum, write=True)) or more or used > self._limit

    def _count(self, added: int) -> None:
        with self._count_lock:
            self._used += added

    def _connect(self, url: sa.URL) -> sa.Engine:
        options: dict[str, Any] = {}
        if self._sqlite:
            options["connect_args"] = {"timeout": _LOCK_STEP, "check_same_thread": False}
            # SQLite has one writer and serves waiting ones in no order: a check would starve behind many saves.
            self._locks[True] = threading.Lock()
            if not url.database or url.database == ":memory:":
                options["poolclass"] = StaticPool  # each connection would have a separate database
                self._locks[False] = self._locks[True]  # one transaction at a time
        engine = sa.create_engine(url, pool_pre_ping=True, hide_parameters=True, **options)
        if self._sqlite:
            sa.event.listen(engine, "connect", _configure_sqlite)
            sa.event.listen(engine, "begin", _begin_sqlite)
        return engine

    def _do(self, work: Callable[[sa.Connection], T], *, write: bool) -> T:
        """Run `work`, again while another process holds the lock. `write`: in a transaction with the write lock."""
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                with _failing(), self._locks[write], self._engines[write].begin() as connection:
                    return work(connection)
            except StoreBlocked:
                if self._closing or time.monotonic() > deadline:
                    raise

    def _file_identity(self) -> tuple[int, int] | None:
        if self._path is None:
            return None
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_dev, status.st_ino


def _configure_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # transactions begin in `_begin_sqlite`
    if connection.execute("PRAGMA page_count").fetchone()[0] == 0:  # in other files it would wait for the write lock
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
    connection.execute("PRAGMA journal_mode=WAL")  # readers do not wait for writers
    connection.execute("PRAGMA synchronous=NORMAL")  # commits survive the process; a power cut may undo the last ones
    connection.execute(f"PRAGMA journal_size_limit={_MAX_LOG_FILE}")


def _begin_sqlite(connection: sa.Connection) -> None:
    """Take the write lock at the beginning: SQLite does not wait for it in a transaction that has read."""
    if connection.get_execution_options().get("quire_write"):
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def _create_tables(connection: sa.Connection) -> None:
    tables = sa.inspect(connection).get_table_names()
    if _responses.name in tables and _schema.name not in tables:  # version 1
        for column in _ADDED:
            kind = column.type.compile(connection.dialect)
            connection.exec_driver_sql(
                f"ALTER TABLE {_responses.name} ADD COLUMN {column.name} {kind} NOT NULL DEFAULT 0"
            )
        parts = [sa.func.coalesce(sa.func.length(_responses.c[name]), 0) for name in ("response", "items", "events")]
        connection.execute(sa.update(_responses).values(size=sum(parts, sa.literal(ROW_BYTES))))
        _age.create(connection)
    _metadata.create_all(connection)
    version = connection.execute(sa.select(_schema.c.version)).scalar()
    if version is None:
        connection.execute(sa.insert(_schema).values(id=1, version=SCHEMA_VERSION))
    else:
        _check_version(version)


def _check_version(version: int | None) -> None:
    if version != SCHEMA_VERSION:
        raise StoreFailed(
            f"The store of responses was made by another version of Quire: its schema is {version}, this server uses "
            f"{SCHEMA_VERSION}."
        )


def _enable_vacuum(connection: sa.Connection) -> None:
    """Rewrite a file that was created without incremental vacuum."""
    if connection.exec_driver_sql("PRAGMA auto_vacuum").scalar() == 0:
        connection.exec_driver_sql("PRAGMA auto_vacuum=INCREMENTAL")
        connection.exec_driver_sql("VACUUM")


def _vacuum(connection: sa.Connection) -> bool:
    """Return free pages to the file system; returns whether there are more."""
    free = connection.exec_driver_sql("PRAGMA freelist_count").scalar() or 0
    if free <= _FREE_PAGES:
        return False
    raw = connection.connection.driver_connection
    assert raw is not None
    raw.execute(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})").fetchall()  # a page for each row that is fetched
    left = connection.exec_driver_sql("PRAGMA freelist_count").scalar() or 0
    return _FREE_PAGES < left < free


def _get(connection: sa.Connection, response_id: str, now: float, *, events: bool) -> dict[str, Any] | None:
    row = connection.execute(_QUERIES[events], {"wanted": response_id, "now": now}).mappings().one_or_none()
    return None if row is None else dict(row)


def _total(connection: sa.Connection) -> int:
    return int(connection.execute(sa.select(sa.func.coalesce(sa.func.sum(_responses.c.size), 0))).scalar_one())


def _delete(connection: sa.Connection, where: sa.ColumnElement[bool]) -> bool:
    """Delete a batch of rows; returns whether there may be more."""
    ids = connection.execute(sa.select(_responses.c.id).where(where).limit(_BATCH)).scalars().all()
    connection.execute(sa.delete(_responses).where(_responses.c.id.in_(ids)))
    return len(ids) == _BATCH


def _delete_oldest(connection: sa.Connection, size: int, keep: str = "") -> int:
    """Delete the oldest rows, but `keep`, until they make `size` bytes, or a batch of them; returns their bytes."""
    query = sa.select(_responses.c.id, _responses.c.size).where(_responses.c.id != keep)
    ids, freed = [], 0
    for row in connection.execute(query.order_by(_responses.c.stored).limit(_BATCH)):
        if freed >= size:
            break
        ids.append(row.id)
        freed += row.size
    connection.execute(sa.delete(_responses).where(_responses.c.id.in_(ids)))
    return freed


@contextmanager
def _failing() -> Iterator[None]:
    """Turn errors of the database into StoreFailed."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, ArgumentError, NoSuchModuleError, ImportError) as error:
        cause = getattr(error, "orig", None) or error
        name = str(getattr(cause, "sqlite_errorname", ""))
        problem = next((text for start, text in _PROBLEMS.items() if name.startswith(start)), "cannot be used")
        kind = StoreBlocked if problem == _LOCKED else StoreFailed
        raise kind(f"The store of responses {problem}.", str(cause)) from error
