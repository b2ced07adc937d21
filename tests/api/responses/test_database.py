"""The table of stored responses: limits, damage, locks and versions."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.api.responses import database as module
from quire.api.responses.database import Database
from quire.api.responses.errors import StoreFailed, TooLargeToStore

MIB = 1 << 20
VERSION_1 = """
CREATE TABLE quire_responses (
    id VARCHAR(200) NOT NULL, expires DOUBLE, lease DOUBLE NOT NULL, response BLOB NOT NULL, items BLOB NOT NULL,
    events BLOB, PRIMARY KEY (id)
);
CREATE INDEX ix_quire_responses_expires ON quire_responses (expires);
INSERT INTO quire_responses VALUES ('old', NULL, 0, '{"id": "old"}', '[]', NULL);
"""
VERSION_2 = """
CREATE TABLE quire_responses (
    id VARCHAR(200) NOT NULL, expires DOUBLE, lease DOUBLE NOT NULL, response BLOB NOT NULL, items BLOB NOT NULL,
    events BLOB, stored DOUBLE DEFAULT 0 NOT NULL, size BIGINT DEFAULT 0 NOT NULL, PRIMARY KEY (id)
);
CREATE INDEX ix_quire_responses_expires ON quire_responses (expires);
CREATE INDEX quire_responses_age ON quire_responses (stored, size);
CREATE TABLE quire_store (id INTEGER NOT NULL, version INTEGER NOT NULL, probe BLOB, PRIMARY KEY (id));
INSERT INTO quire_store VALUES (1, 2, NULL);
INSERT INTO quire_responses VALUES ('old', NULL, 0, '{"id": "old"}', '[]', NULL, 5, 317);
"""
_CLOSED_WHILE_CHECKED = """
import asyncio
from quire.api.responses.database import Database
from quire.api.responses.worker import DatabaseWorker

async def main():
    for turn in range(150):
        worker = DatabaseWorker(lambda: Database("sqlite://"))
        await worker.check()
        await asyncio.sleep(0.0005 * (turn % 7))  # somewhere in the first check or sweep
        await worker.aclose()

asyncio.run(main())
"""
_WRITER = """
import sys
from quire.api.responses.database import Database
database = Database(sys.argv[1], 1 << 30)
for number in range(10**6):
    row = {"id": str(number), "expires": None, "lease": 0.0, "response": b"x" * 20000, "items": b"", "events": None}
    database.put({**row, "size": 20000, "owner": ""})
    print(number, flush=True)
"""
_FULL_DISK = """
import resource, sys
from quire.api.responses.database import Database
from quire.api.responses.errors import StoreFailed
database = Database(sys.argv[1], 1 << 30)
database.check(write=True)
row = {"id": "x", "expires": None, "lease": 0.0, "response": b"x" * (1 << 22), "items": b"", "events": None}
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
try:
    database.put({**row, "size": 1 << 22, "owner": ""})
except StoreFailed as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
database.put({**row, "size": 1 << 22, "owner": ""})
print("stored", database.get("x", "", 0.0, events=False) is not None)
"""


def url_of(folder: Path) -> str:
    return f"sqlite:///{folder / 'kept.db'}"


def row(name: str, size: int = 1000, expires: float | None = None, owner: str = "") -> dict[str, Any]:
    blobs = {"response": b"x" * size, "items": b"", "events": None}
    return {"id": name, "owner": owner, "expires": expires, "lease": 0.0, **blobs, "size": size}


def names(database: Database, *ids: str) -> list[str]:
    return [name for name in ids if database.get(name, "", 0.0, events=False) is not None]


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Another program holds the write lock."""
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(tmp_path) if request.param == "file" else "sqlite://"


def test_the_oldest_rows_make_room(url: str) -> None:
    with closing(Database(url, 10 * MIB)) as database:
        ids = [str(number) for number in range(25)]
        for name in ids:
            database.put(row(name, MIB))
        assert names(database, *ids) == ids[-10:]
        database.put(row("15", 3 * MIB))  # replaced by a larger one, it is still the oldest, but the one that is put
        assert names(database, *ids) == ["15", *ids[-7:]]
        assert database.delete("15", "")
        database.put(row("after", 3 * MIB))
        assert names(database, *ids, "after") == [*ids[-7:], "after"]


def test_who_stores_most_makes_room(url: str) -> None:
    with closing(Database(url, 10 * MIB)) as database:
        database.put(row("first", MIB, owner="b"))
        for number in range(20):
            database.put(row(str(number), MIB, owner="a"))
        assert database.get("first", "b", 0.0, events=False) is not None
        for number in range(20, 23):
            database.put(row(str(number), 2 * MIB, owner="b"))  # until both have half
        present = [database.get(str(number), "a", 0.0, events=False) is not None for number in range(20)]
        assert present == [False] * 16 + [True] * 4 or present == [False] * 15 + [True] * 5


def test_an_owner_whose_only_row_is_the_new_one_takes_room_of_others(url: str) -> None:
    with closing(Database(url, 10 * MIB)) as database:
        for number in range(4):
            database.put(row(str(number), MIB, owner="b"))
        database.put(row("large", 9 * MIB, owner="a"))
        assert database.get("large", "a", 0.0, events=False) is not None
        assert [database.get(str(n), "b", 0.0, events=False) is not None for n in range(4)] == [False] * 3 + [True]


def test_rows_exist_for_their_owner_only(url: str) -> None:
    with closing(Database(url)) as database:
        database.put(row("x", owner="a"))
        database.put(row("all"))
        for reader, visible in (("a", ["x", "all"]), ("b", ["all"]), ("", ["all"])):
            assert [name for name in ("x", "all") if database.get(name, reader, 0.0, events=True)] == visible
        assert not database.delete("x", "b")
        assert not database.delete("x", "")
        assert database.delete("x", "a")


def test_a_connection_is_closed_when_its_user_has_ended(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    database, entered, leave = Database(url), threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        entered.set()
        assert leave.wait(60)

    monkeypatch.setattr(module, "_check_version", hold)  # while the connection has a transaction
    with ThreadPoolExecutor(1) as threads:
        check = threads.submit(database.check, write=True)
        assert entered.wait(60)
        database.close()  # does not wait
        leave.set()
        with pytest.raises(StoreFailed, match="closed"):  # its second part: the first has ended well
            check.result(60)
    with pytest.raises(StoreFailed, match="closed"):
        database.get("x", "", 0.0, events=False)


def test_closing_during_checks_does_not_crash() -> None:
    subprocess.run([sys.executable, "-c", _CLOSED_WHILE_CHECKED], check=True, timeout=120)


def test_many_small_rows_make_room_for_a_large_one(url: str) -> None:
    with closing(Database(url, 10 * MIB)) as database:
        for number in range(256):
            database.put(row(str(number), 40 * 1024))
        database.put(row("large", 10 * MIB))
        assert names(database, "0", "100", "255", "large") == ["large"]


def test_a_row_larger_than_the_limit_is_refused_and_evicts_nothing(url: str) -> None:
    with closing(Database(url, MIB)) as database:
        database.put(row("small"))
        with pytest.raises(TooLargeToStore, match="--response-store-size"):
            database.put(row("large", 2 * MIB))
        assert names(database, "small", "large") == ["small"]


def test_the_limit_holds_for_rows_of_other_servers(tmp_path: Path) -> None:
    with closing(Database(url_of(tmp_path), 4 * MIB)) as first, closing(Database(url_of(tmp_path), 4 * MIB)) as other:
        for number in range(4):
            first.put(row(f"one {number}", MIB))
            other.put(row(f"other {number}", MIB))
        while first.sweep(0.0):
            pass
        left = names(other, *(f"{who} {number}" for number in range(4) for who in ("one", "other")))
        assert left == ["one 2", "other 2", "one 3", "other 3"]


def test_sweeping_deletes_expired_rows_and_shrinks_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH", 10)
    file = tmp_path / "kept.db"
    with closing(Database(url_of(tmp_path), 100 * MIB)) as database:
        for number in range(40):
            database.put(row(str(number), 128 << 10, expires=5.0 if number else None))
        assert database.sweep(6.0)  # in parts, so that nobody waits for it
        while database.sweep(6.0):
            pass
        assert names(database, "0", "1", "39") == ["0"]
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("SELECT count(*) FROM quire_responses").fetchone() == (1,)
    assert file.stat().st_size < 4 * MIB


def test_rows_expire_for_readers_at_once(url: str) -> None:
    with closing(Database(url)) as database:
        database.put(row("x", expires=5.0))
        assert database.get("x", "", 5.0, events=True) is not None
        assert database.get("x", "", 5.1, events=True) is None


@pytest.mark.parametrize("script", [VERSION_1, VERSION_2])
def test_a_database_of_an_earlier_version_is_brought_up_to_date(tmp_path: Path, script: str) -> None:
    with closing(sqlite3.connect(tmp_path / "kept.db")) as old:
        old.executescript(script)
    for _ in range(2):
        with closing(Database(url_of(tmp_path))) as database:
            for reader in ("", "somebody"):  # nobody knows whose it is
                stored_row = database.get("old", reader, time.time(), events=True)
                assert stored_row is not None
                assert stored_row["size"] in (317, module.ROW_BYTES + len('{"id": "old"}') + len("[]"))
            database.put(row("new", owner="somebody"))
            assert database.get("new", "other", time.time(), events=True) is None
            database.check(write=True)
    with closing(sqlite3.connect(tmp_path / "kept.db")) as connection:
        assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)  # incremental


def test_a_database_of_a_later_version_is_refused(tmp_path: Path) -> None:
    Database(url_of(tmp_path)).close()
    with closing(sqlite3.connect(tmp_path / "kept.db")) as connection, connection:
        connection.execute("UPDATE quire_store SET version = 4")
    with pytest.raises(StoreFailed, match="another version of Quire: its schema is 4, this server uses 3"):
        Database(url_of(tmp_path))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda file: file.mkdir(), "cannot be opened"),
        (lambda file: file.write_text("some text\n" * 1000), "is not a SQLite database"),
        (lambda file: file.write_text("short"), "is not a SQLite database"),
        (lambda file: file.write_bytes(b"SQLite format 3\0" + b"\xff" * 8000), "is not a SQLite database"),
    ],
)
def test_what_is_no_database_is_said(tmp_path: Path, make: Any, problem: str) -> None:
    file = tmp_path / "kept.db"
    make(file)
    before = file.read_bytes() if file.is_file() else None
    with pytest.raises(StoreFailed, match=f"^The store of responses {problem}.$"):
        Database(url_of(tmp_path))
    assert before is None or file.read_bytes() == before


@pytest.mark.parametrize("url", ["nothing", "nothing://x", "oracle+missing://x", "sqlite:////no/such/folder/x.db"])
def test_a_url_that_cannot_be_used_is_said(url: str) -> None:
    with pytest.raises(StoreFailed, match="The store of responses cannot be"):
        Database(url)


def test_a_damaged_page_is_said(tmp_path: Path) -> None:
    with closing(Database(url_of(tmp_path))) as database:
        for number in range(200):
            database.put(row(str(number)))
    content = bytearray((tmp_path / "kept.db").read_bytes())
    content[4096:] = b"\xaa" * (len(content) - 4096)
    (tmp_path / "kept.db").write_bytes(content)
    with pytest.raises(StoreFailed, match="is corrupt"):
        Database(url_of(tmp_path))


def test_a_read_only_database_is_said(tmp_path: Path) -> None:
    Database(url_of(tmp_path)).close()
    url = f"sqlite:///file:{tmp_path / 'kept.db'}?mode=ro&uri=true"
    with closing(Database(url)) as database, pytest.raises(StoreFailed, match="is read-only"):
        database.check(write=True)


def test_a_full_database_is_said_until_there_is_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = module._configure_sqlite

    def connect_small(connection: Any, record: Any) -> None:
        connect(connection, record)
        connection.execute("PRAGMA max_page_count=100")

    monkeypatch.setattr(module, "_configure_sqlite", connect_small)
    with closing(Database(url_of(tmp_path))) as database:
        database.put(row("small", 200 << 10))
        with pytest.raises(StoreFailed, match="has no space left") as failed:
            database.put(row("large", MIB))
        for word in ("INSERT", "quire_responses", str(tmp_path)):
            assert word not in str(failed.value)
        database.check(write=True)
        assert names(database, "small", "large") == ["small"]
        database.delete("small", "")
        database.put(row("other", 200 << 10))


def test_a_full_disk_is_said_until_there_is_space(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, url_of(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    first, second = done.stdout.splitlines()
    assert first.startswith("The store of responses ")
    assert second == "stored True"


def test_a_locked_database_is_said_until_it_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.0)
    with closing(Database(url_of(tmp_path))) as database:
        database.put(row("before"))
        with locked(tmp_path / "kept.db"):
            with pytest.raises(StoreFailed, match="is locked by another process"):
                database.put(row("x"))
            with pytest.raises(StoreFailed, match="is locked by another process"):
                database.check(write=False)
            assert names(database, "before") == ["before"]  # reading does not wait
            with pytest.raises(StoreFailed, match="is locked by another process"):
                Database(url_of(tmp_path))
        database.put(row("x"))


def test_closing_ends_the_wait_for_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_SECONDS", 1000.0)
    database = Database(url_of(tmp_path))
    with locked(tmp_path / "kept.db"), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(database.put, row("x"))
        database.close()
        with pytest.raises(StoreFailed, match="is locked"):
            waiting.result(60)


def test_two_servers_share_a_file(tmp_path: Path) -> None:
    with (
        closing(Database(url_of(tmp_path))) as first,
        closing(Database(url_of(tmp_path))) as other,
        ThreadPoolExecutor(4) as pool,
    ):
        ids = [str(number) for number in range(200)]
        list(pool.map(lambda name: (first if int(name) % 2 else other).put(row(name)), ids))
        assert names(first, *ids) == names(other, *ids) == ids


def test_what_was_stored_outlives_a_killed_writer(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, url_of(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    stored = [writer.stdout.readline().strip() for _ in range(200)]
    writer.kill()
    stored += writer.stdout.read().split()[:-1]  # the last line may be cut
    writer.wait()
    writer.stdout.close()
    with closing(Database(url_of(tmp_path))) as database:
        assert names(database, *stored) == stored
        database.put(row("after"))
    with closing(sqlite3.connect(tmp_path / "kept.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_file_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    with closing(Database(url_of(tmp_path))) as database:
        assert not database.replaced()
        (tmp_path / "kept.db").unlink()
        assert database.replaced()
        (tmp_path / "kept.db").write_bytes(b"")
        assert database.replaced()
    with closing(Database("sqlite://")) as database:
        assert not database.replaced()


def test_a_new_connection_reads_while_another_program_writes(tmp_path: Path) -> None:
    path = tmp_path / "kept.db"
    with closing(Database(url_of(tmp_path))) as database, closing(sqlite3.connect(path, isolation_level=None)) as other:
        database.put(row("kept", 100))
        database._engine.dispose()
        other.execute("BEGIN IMMEDIATE")
        assert names(database, "kept") == ["kept"]


def test_operations_of_one_server_do_not_wait_for_each_other_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite serves those who wait for its lock in no order: a check would starve behind saves on a slow disk."""
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.0)
    with closing(Database(url_of(tmp_path))) as database:
        holding, release = threading.Event(), threading.Event()

        def hold(_: Any) -> None:
            holding.set()
            assert release.wait(60)

        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(database._do, hold, write=True)
            assert holding.wait(60)
            waiting = threads.submit(database.check, write=True)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=1.0)  # four times as long as SQLite itself waits
            release.set()
            first.result(timeout=60)
            waiting.result(timeout=60)
