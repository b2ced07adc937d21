"""A SQLite file of responses without SQLAlchemy, whose import takes a quarter of a second: whether it can be used."""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from quire.api.responses.errors import StoreBlocked, StoreFailed

SCHEMA_VERSION = 3
LOCK_SECONDS = 5.0  # how long an operation waits for another writer
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


def store_failure(cause: BaseException) -> StoreFailed:
    """Return the error of a store whose database has raised this one."""
    name = str(getattr(cause, "sqlite_errorname", ""))
    problem = next((text for start, text in _PROBLEMS.items() if name.startswith(start)), "cannot be used")
    kind = StoreBlocked if problem == _LOCKED else StoreFailed
    return kind(f"The store of responses {problem}.", str(cause))


def version_failure(version: int | None) -> StoreFailed:
    """Return the error of a store whose schema this version of Quire does not know."""
    return StoreFailed(
        f"The store of responses was made by another version of Quire: its schema is {version}, this server uses "
        f"{SCHEMA_VERSION}."
    )


def check_file(path: Path) -> None:
    """Check that a file, which may not exist yet, is a database that can be locked for writing.

    Raises:
        StoreFailed: it cannot.
    """
    version = None
    try:
        with closing(sqlite3.connect(path, LOCK_SECONDS, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            with suppress(sqlite3.OperationalError):  # it has no tables yet
                version = connection.execute("SELECT version FROM quire_store").fetchone()
            connection.execute("ROLLBACK")
    except sqlite3.Error as error:
        raise store_failure(error) from error
    if version is not None and version[0] > SCHEMA_VERSION:
        raise version_failure(version[0])
