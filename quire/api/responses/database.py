"""The table of stored responses, through SQLAlchemy."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from quire.api.responses.errors import StoreFailed

_LOCK_TIMEOUT = 30  # seconds for another writer of a SQLite file
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
)


class Database:
    """Rows by id. Can be used from any thread."""

    def __init__(self, url: str) -> None:
        """Connect, and create the table if there is none.

        Raises:
            StoreFailed: the URL is not valid, its driver is missing, or the database cannot be used.
        """
        with _failing("cannot be opened"):
            parsed = sa.make_url(url)
            options: dict[str, Any] = {}
            self._serialized: AbstractContextManager[Any] = nullcontext()
            if parsed.get_backend_name() == "sqlite":
                options["connect_args"] = {"timeout": _LOCK_TIMEOUT, "check_same_thread": False}
                if not parsed.database or parsed.database == ":memory:":
                    options["poolclass"] = StaticPool  # each connection would have a database of its own
                    self._serialized = threading.Lock()  # one transaction at a time
            self._engine = sa.create_engine(parsed, pool_pre_ping=True, **options)
            if self._engine.dialect.name == "sqlite":
                sa.event.listen(self._engine, "connect", _write_ahead)
            _metadata.create_all(self._engine)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def put(self, row: Mapping[str, Any], now: float) -> None:
        """Insert or replace a row, and delete rows that have expired."""
        with _failing("did not accept the response"), self._serialized, self._engine.begin() as connection:
            changed = connection.execute(sa.update(_responses).where(_responses.c.id == row["id"]).values(**row))
            if changed.rowcount == 0:
                connection.execute(sa.delete(_responses).where(_responses.c.expires < now))
                connection.execute(sa.insert(_responses).values(**row))

    def get(self, response_id: str, now: float) -> dict[str, Any] | None:
        """The row with this id, unless it has expired."""
        alive = sa.or_(_responses.c.expires.is_(None), _responses.c.expires >= now)
        query = sa.select(_responses).where(_responses.c.id == response_id, alive)
        with _failing("did not answer"), self._serialized, self._engine.connect() as connection:
            row = connection.execute(query).mappings().one_or_none()
            return None if row is None else dict(row)

    def delete(self, response_id: str) -> bool:
        """Delete a row; returns whether it existed."""
        with _failing("did not answer"), self._serialized, self._engine.begin() as connection:
            return connection.execute(sa.delete(_responses).where(_responses.c.id == response_id)).rowcount > 0


def _write_ahead(connection: Any, _: Any) -> None:
    """Use write-ahead logging, so that readers do not wait for writers."""
    connection.execute("PRAGMA journal_mode=WAL")


@contextmanager
def _failing(how: str) -> Iterator[None]:
    try:
        yield
    except (SQLAlchemyError, ArgumentError, NoSuchModuleError, ImportError) as error:
        raise StoreFailed(f"The store of responses {how}: {error}") from error
