"""The table of stored responses, through SQLAlchemy."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import zip_longest
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import StaticPool
from sqlalchemy.schema import CreateColumn

from quire.api.responses.errors import StoreBlocked, StoreFailed, TooLargeToStore
from quire.api.responses.sqlite_file import LOCK_SECONDS, SCHEMA_VERSION, store_failure, version_failure

T = TypeVar("T")

ROW_BYTES = 300  # of a row besides its blobs: ids, numbers, its place in the indices
_FILE_BYTES, _MEMORY_BYTES = 1 << 30, 256 << 20  # default limits
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
    sa.Column("owner", sa.String(64), nullable=False, server_default=sa.text("''")),
)
_age = sa.Index("quire_responses_age", _responses.c.stored, _responses.c.size)
_of_owner = sa.Index("quire_responses_owner", _responses.c.owner, _responses.c.stored, _responses.c.size)
_schema = sa.Table(
    "quire_store",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("probe", _Blob),
)
# Responses of earlier versions, and of servers without keys, have no owner, and are everybody's as they were before.
_VISIBLE = sa.and_(
    _responses.c.id == sa.bindparam("wanted"),
    sa.or_(_responses.c.owner == sa.bindparam("reader"), _responses.c.owner == ""),
)
# Without and with events.
_QUERIES = {
    events: sa.select(*(column for column in _responses.c if events or column.name != "events")).where(
        _VISIBLE,
        sa.or_(_responses.c.expires.is_(None), _responses.c.expires >= sa.bindparam("now")),
    )
    for events in (False, True)
}
_ADDED_IN_2 = (_responses.c.stored, _responses.c.size)
_ADDED_IN_3 = (_responses.c.owner,)


class Database:
    """Rows by id, with a limit of their total size. Can be used from any thread.

    Every method raises StoreFailed if the database cannot be used.
    """

    def __init__(self, url: str, limit: int | None = None) -> None:
        """Connect, and create the tables, or update tables of an earlier version.

        Args:
            url: URL in SQLAlchemy's format.
            limit: bytes of all rows together; None for 1 GiB, or 256 MiB in memory. When it is reached, the oldest rows
                of the owner with the most bytes are deleted.
        """
        self._used = Counter[str]()  # bytes of rows by owner; other servers' rows are counted by `sweep`
        self._lock = threading.Lock()  # of the numbers
        self._operations = 0  # that use a connection
        self._closing = threading.Event()
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
            self._used = self._do(_sizes, write=False)
        except StoreFailed:
            self.close()
            raise
        self._file = self._file_identity()

    def close(self) -> None:
        """Close all connections, or let the last operation that uses one do it. Operations that wait for a lock fail.

        SQLite crashes if a connection is closed while another thread uses it.
        """
        with self._lock:
            self._closing.set()
            in_use = self._operations
        if not in_use:
            self._engine.dispose()

    def replaced(self) -> bool:
        """Return whether its file was removed, or replaced by another, since it was opened."""
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
        """Insert or replace a row. If the limit is reached, others are deleted.

        Raises:
            TooLargeToStore: this row alone exceeds the limit.
        """
        if row["size"] > self._limit:
            raise TooLargeToStore(
                f"The response takes {row['size']} bytes, more than the limit of all stored responses together "
                f"({self._limit} bytes; --response-store-size)."
            )
        by_id = _responses.c.id == row["id"]

        def work(connection: sa.Connection) -> dict[str, int]:
            before = connection.execute(sa.select(_responses.c.size).where(by_id)).scalar()
            if before is None:
                connection.execute(sa.insert(_responses).values(**row, stored=time.time()))
            else:
                connection.execute(sa.update(_responses).where(by_id).values(**row))
            added = {row["owner"]: row["size"] - (before or 0)}
            while evicted := self._evict(connection, added, row["id"]):
                owner, freed = evicted
                added[owner] = added.get(owner, 0) - freed
            return added

        self._count(self._do(work, write=True))

    def get(self, response_id: str, owner: str, now: float, *, events: bool) -> dict[str, Any] | None:
        """The row with this id, unless it has expired or belongs to another owner. `events`: with this column."""
        return self._do(lambda connection: _get(connection, response_id, owner, now, events=events), write=False)

    def follow(
        self, response_id: str, owner: str, now: float, next_id: Callable[[dict[str, Any] | None], str | None]
    ) -> None:
        """Read a row, then those whose ids `next_id` gives for the row before, until it gives None."""

        def work(connection: sa.Connection) -> None:
            following: str | None = response_id
            while following is not None:
                following = next_id(_get(connection, following, owner, now, events=False))

        self._do(work, write=False)

    def delete(self, response_id: str, owner: str) -> bool:
        """Delete a row, unless it belongs to another owner; returns whether there was one."""

        def work(connection: sa.Connection) -> dict[str, int]:
            query = sa.select(_responses.c.owner, _responses.c.size).where(_VISIBLE)
            row = connection.execute(query, {"wanted": response_id, "reader": owner}).one_or_none()
            if row is None:
                return {}
            connection.execute(sa.delete(_responses).where(_responses.c.id == response_id))
            return {row.owner: -row.size}

        removed = self._do(work, write=True)
        self._count(removed)
        return bool(removed)

    def sweep(self, now: float) -> bool:
        """Delete some expired rows, some of the oldest if there are too many, and shrink the file a little.

        Returns whether more of this is left to do.
        """

        def work(connection: sa.Connection) -> bool:
            expired = _delete(connection, _responses.c.expires < now)
            with self._lock:
                self._used = _sizes(connection)
            return expired

        more = self._do(work, write=True)
        if evicted := self._do(lambda connection: self._evict(connection, {}), write=True):
            owner, freed = evicted
            self._count({owner: -freed})
        return (self._sqlite and self._do(_vacuum, write=True)) or more or evicted is not None

    def _count(self, added: Mapping[str, int]) -> None:
        with self._lock:
            for owner, size in added.items():
                self._used[owner] += size

    def _evict(self, connection: sa.Connection, added: Mapping[str, int], keep: str = "") -> tuple[str, int] | None:
        """Delete some of the oldest rows of the owner with the most bytes, if all rows are more than the limit.

        So an owner that stores much loses its own responses, not those of others.

        Args:
            connection: a connection with the write lock.
            added: bytes by owner that are not counted yet.
            keep: id of a row that stays.

        Returns:
            The owner and the bytes of the rows; None if nothing is to be deleted, or can be.
        """
        with self._lock:
            used = {owner: self._used[owner] + added.get(owner, 0) for owner in self._used.keys() | added.keys()}
        excess = sum(used.values()) - self._limit
        if excess <= 0:
            return None
        owners = sorted(used, key=lambda owner: used[owner], reverse=True)
        for owner, following in zip_longest(owners, owners[1:]):
            lead = used[owner] - used.get(following, 0)
            if freed := _delete_oldest(connection, owner, min(excess, max(lead, 1)), keep):
                return owner, freed
        return None

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
        with self._operation():
            while True:
                try:
                    with _failing(), self._locks[write], self._engines[write].begin() as connection:
                        return work(connection)
                except StoreBlocked:
                    if self._closing.is_set() or time.monotonic() > deadline:
                        raise

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """Keep connections open meanwhile. The last operation of a database that was closed closes them."""
        with self._lock:
            if self._closing.is_set():
                raise StoreFailed("The store of responses is closed.")
            self._operations += 1
        try:
            yield
        finally:
            with self._lock:
                self._operations -= 1
                last = self._closing.is_set() and not self._operations
            if last:
                self._engine.dispose()

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
    if _responses.name in tables:
        known = connection.execute(sa.select(_schema.c.version)).scalar() if _schema.name in tables else 1
        _update_table(connection, known)
    _metadata.create_all(connection)
    version = connection.execute(sa.select(_schema.c.version)).scalar()
    if version is None:
        connection.execute(sa.insert(_schema).values(id=1, version=SCHEMA_VERSION))
    else:
        _check_version(version)


def _update_table(connection: sa.Connection, version: int | None) -> None:
    """Add to a table what it lacks."""
    if version == 1:
        _add_columns(connection, _ADDED_IN_2)
        parts = [sa.func.coalesce(sa.func.length(_responses.c[name]), 0) for name in ("response", "items", "events")]
        connection.execute(sa.update(_responses).values(size=sum(parts, sa.literal(ROW_BYTES))))
        _age.create(connection)
    if version in (1, 2):
        _add_columns(connection, _ADDED_IN_3)
        _of_owner.create(connection)
    if version == 2:
        connection.execute(sa.update(_schema).values(version=SCHEMA_VERSION))


def _add_columns(connection: sa.Connection, columns: Sequence[sa.Column[Any]]) -> None:
    for column in columns:
        definition = CreateColumn(column).compile(dialect=connection.dialect)
        connection.exec_driver_sql(f"ALTER TABLE {_responses.name} ADD COLUMN {definition}")


def _check_version(version: int | None) -> None:
    if version != SCHEMA_VERSION:
        raise version_failure(version)


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


def _get(connection: sa.Connection, response_id: str, owner: str, now: float, *, events: bool) -> dict[str, Any] | None:
    values = {"wanted": response_id, "reader": owner, "now": now}
    row = connection.execute(_QUERIES[events], values).mappings().one_or_none()
    return None if row is None else dict(row)


def _sizes(connection: sa.Connection) -> Counter[str]:
    """Bytes of the rows of each owner."""
    query = sa.select(_responses.c.owner, sa.func.sum(_responses.c.size)).group_by(_responses.c.owner)
    return Counter({owner: int(size) for owner, size in connection.execute(query)})


def _delete(connection: sa.Connection, where: sa.ColumnElement[bool]) -> bool:
    """Delete a batch of rows; returns whether there may be more."""
    ids = connection.execute(sa.select(_responses.c.id).where(where).limit(_BATCH)).scalars().all()
    connection.execute(sa.delete(_responses).where(_responses.c.id.in_(ids)))
    return len(ids) == _BATCH


def _delete_oldest(connection: sa.Connection, owner: str, size: int, keep: str) -> int:
    """Delete the oldest rows of an owner, but `keep`, until they make `size` bytes, or a batch; returns their bytes."""
    query = sa.select(_responses.c.id, _responses.c.size).where(_responses.c.owner == owner, _responses.c.id != keep)
    ids = []
    freed = 0
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
        raise store_failure(cause) from error
