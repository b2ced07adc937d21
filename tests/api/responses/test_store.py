"""The store of responses behind a server: what clients see when it works, is full or cannot be used."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import aclosing, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.api.responses import database, store, worker
from quire.api.responses.errors import NoSuchResponse
from quire.api.responses.store import ResponseStore, StoredResponse
from tests.support.fake_core import FakeCore
from tests.support.responses import PATH, ask, events_in, output_text, stream
from tests.support.server import Server, running_server, until

NOT_STORED = "x-quire-not-stored"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits for locks, and frequent checks."""
    monkeypatch.setattr(database, "LOCK_SECONDS", 0.0)
    monkeypatch.setattr(database, "_LOCK_STEP", 0.02)
    monkeypatch.setattr(worker, "_CHECK_SECONDS", 0.02)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Another program holds the write lock of the server's database."""
    with closing(sqlite3.connect(folder / "responses.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


async def health(server: Server) -> Any:
    answer = await server.http.get("/health")
    assert answer.status_code == 200
    return answer.json() if answer.content else None


async def until_health(server: Server, expected: Any) -> None:
    async with asyncio.timeout(60):
        while await health(server) != expected:
            await asyncio.sleep(0.005)


def degraded(problem: str) -> dict[str, Any]:
    return {"status": "degraded", "reasons": [f"The store of responses {problem}."]}


def assert_says_no_more_than_needed(answer: httpx.Response, folder: Path) -> None:
    for word in ("SELECT", "INSERT", "UPDATE", "BEGIN", "quire_responses", "sqlalche", "sqlite3", str(folder)):
        assert word not in answer.text


async def test_responses_expire(tmp_path: Path) -> None:
    async with running_server(tmp_path, response_ttl=1e-6) as server:
        body = await ask(server)
        assert (await server.http.get(f"{PATH}/{body['id']}")).status_code == 404


async def test_responses_expire_while_nobody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_SWEEP_SECONDS", 0.0)
    async with running_server(tmp_path, response_ttl=1e-6) as server:
        await ask(server)
        with closing(sqlite3.connect(tmp_path / "responses.db")) as connection:
            await until(lambda: connection.execute("SELECT count(*) FROM quire_responses").fetchone() == (0,))


async def test_responses_in_memory(tmp_path: Path) -> None:
    async with running_server(tmp_path, response_store="sqlite://") as server:
        bodies = await asyncio.gather(*(ask(server, str(number)) for number in range(20)))
        answers = await asyncio.gather(*(server.http.get(f"{PATH}/{body['id']}") for body in bodies))
    assert [answer.json() for answer in answers] == bodies


@pytest.mark.parametrize("where", ["file", "memory"])
async def test_the_oldest_responses_make_room(tmp_path: Path, where: str) -> None:
    url = "sqlite://" if where == "memory" else None
    async with running_server(tmp_path, response_store=url, response_store_size="1MiB") as server:
        first = await ask(server)
        second = await ask(server, previous_response_id=first["id"])
        large = [{"role": "user", "content": "hi", "note": "x" * 100_000}]
        ids = [(await ask(server, large))["id"] for _ in range(12)]
        assert (await server.http.get(f"{PATH}/{ids[-1]}")).status_code == 200
        for gone in (first["id"], second["id"]):
            answer = await server.http.get(f"{PATH}/{gone}")
            assert answer.status_code == 404
            assert "removed because the store was full" in answer.json()["error"]["message"]
            answer = await server.post(PATH, {"input": "more", "previous_response_id": gone})
            assert (answer.status_code, answer.json()["error"]["param"]) == (404, "previous_response_id")


async def test_a_response_too_large_for_the_store_is_given_nevertheless(tmp_path: Path) -> None:
    async with running_server(tmp_path, response_store_size="1MiB") as server:
        item = {"role": "user", "content": "hi", "note": "x" * (1 << 20)}
        answer = await server.post(PATH, {"input": [item]})
        assert answer.status_code == 200
        assert "--response-store-size" in answer.headers[NOT_STORED]
        assert answer.json()["store"] is False
        refused = await server.post(PATH, {"input": [item], "background": True})
        assert refused.status_code == 413
        assert "--response-store-size" in refused.json()["error"]["message"]
        assert "retry-after" not in refused.headers
        assert await health(server) is None  # the store works
        assert (await ask(server))["store"] is True


async def test_answers_are_given_while_the_store_is_locked(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        before = await ask(server)
        assert await health(server) is None
        with locked(tmp_path):
            answer = await server.post(PATH, {"input": "hello"})
            assert answer.status_code == 200
            assert "HELLO" in output_text(answer.json())
            assert answer.json()["store"] is False
            assert answer.headers[NOT_STORED] == "The store of responses is locked by another process."
            events = await stream(server, "hello")
            assert events[-1]["type"] == "response.completed"
            assert events[-1]["response"]["store"] is False
            await until_health(server, degraded("is locked by another process"))
            for path in ("/ready", "/ping"):
                assert (await server.http.get(path)).status_code == 200
            assert (await server.http.get(f"{PATH}/{before['id']}")).json() == before  # reading needs no lock
            more = await server.post(PATH, {"input": "more", "previous_response_id": before["id"]})
            assert more.status_code == 200
            for refused in (
                await server.post(PATH, {"input": "hi", "background": True}),
                await server.http.delete(f"{PATH}/{before['id']}"),
            ):
                assert refused.status_code == 503
                assert int(refused.headers["retry-after"]) >= 1
                assert_says_no_more_than_needed(refused, tmp_path)
        await until_health(server, None)
        after = await server.post(PATH, {"input": "hello"})
        assert NOT_STORED not in after.headers
        assert after.json()["store"] is True
        assert (await server.http.get(f"{PATH}/{answer.json()['id']}")).status_code == 404


async def test_a_background_response_that_cannot_be_kept_fails(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core) as server:
        body = await ask(server, "hello", background=True)
        path = f"{PATH}/{body['id']}"
        await until(lambda: core.active)
        with locked(tmp_path):
            following = asyncio.create_task(server.http.get(path, params={"stream": True}))
            core.hold.clear()
            core.allow(1)
            events = events_in((await following).text)
            assert events[-1]["type"] == "response.failed"
            assert "locked" in events[-1]["response"]["error"]["message"]
        await until_health(server, None)
        refused = await server.post(PATH, {"input": "more", "previous_response_id": body["id"]})
        assert refused.status_code == 400  # not finished, until its lease ends


async def test_what_could_not_be_stored_whole_is_stored_as_failed(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core, response_store_size="1MiB") as server:
        item = {"role": "user", "content": "hello", "note": "x" * ((1 << 20) - 3000)}
        body = await ask(server, [item], background=True)
        core.hold.clear()
        core.allow(1)
        path = f"{PATH}/{body['id']}"
        async with asyncio.timeout(60):
            while (polled := (await server.http.get(path)).json())["status"] in ("queued", "in_progress"):
                await asyncio.sleep(0.005)
        stored = (await server.http.get(path)).json()
    assert polled["status"] == stored["status"] == "failed"
    assert "--response-store-size" in stored["error"]["message"]


@pytest.mark.parametrize("removed", [["responses.db"], ["responses.db", "responses.db-wal", "responses.db-shm"]])
async def test_a_removed_file_is_made_again(tmp_path: Path, removed: list[str]) -> None:
    async with running_server(tmp_path) as server:
        gone = await ask(server)
        for name in removed:
            (tmp_path / name).unlink(missing_ok=name != "responses.db")
        assert (await server.http.get(f"{PATH}/{gone['id']}")).status_code == 404
        body = await ask(server)
        assert (await server.http.get(f"{PATH}/{body['id']}")).json() == body
    assert (tmp_path / "responses.db").exists()


async def test_a_folder_that_vanishes_and_returns(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    async with running_server(tmp_path, response_store=f"sqlite:///{folder}/responses.db") as server:
        body = await ask(server)
        folder.rename(tmp_path / "elsewhere")
        await until_health(server, degraded("cannot be opened"))
        answer = await server.http.get(f"{PATH}/{body['id']}")
        assert answer.status_code == 503
        assert_says_no_more_than_needed(answer, tmp_path)
        assert (await server.post(PATH, {"input": "hi"})).headers[NOT_STORED]
        (tmp_path / "elsewhere").rename(folder)
        await until_health(server, None)
        assert (await server.http.get(f"{PATH}/{body['id']}")).json() == body


async def test_a_file_that_becomes_something_else(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        await ask(server)
        (tmp_path / "other").write_text("not a database " * 1000)
        with closing(sqlite3.connect(tmp_path / "responses.db")) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        # In one step: a check in between would make a new database, whose log would hide what is then written over it.
        (tmp_path / "other").replace(tmp_path / "responses.db")
        await until_health(server, degraded("is not a SQLite database"))
        assert (await server.post(PATH, {"input": "hi"})).headers[NOT_STORED]
        assert (await server.post("/v1/completions", {"prompt": "hi"})).status_code == 200


async def test_a_stored_response_that_is_damaged(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        body = await ask(server)
        with closing(sqlite3.connect(tmp_path / "responses.db")) as connection, connection:
            connection.execute("UPDATE quire_responses SET response = '{'")
        for answer in (
            await server.http.get(f"{PATH}/{body['id']}"),
            await server.post(PATH, {"input": "more", "previous_response_id": body["id"]}),
        ):
            assert answer.status_code == 503
            assert "corrupt" in answer.json()["error"]["message"]


async def test_the_loop_serves_others_while_the_store_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "LOCK_SECONDS", 1000.0)
    async with running_server(tmp_path) as server:
        await ask(server)
        with locked(tmp_path):
            waiting = [asyncio.create_task(ask(server)) for _ in range(10)]
            for _ in range(50):
                assert (await server.http.get("/health")).status_code == 200
                assert (await ask(server, store=False))["status"] == "completed"
            assert not any(task.done() for task in waiting)
        assert all(body["store"] for body in await asyncio.gather(*waiting))


async def test_one_wait_for_a_lock_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the database is locked, not each response waits for it in turn."""
    monkeypatch.setattr(database, "LOCK_SECONDS", 0.3)
    tried = []
    put = database.Database.put

    def counted(self: database.Database, row: Any) -> None:
        tried.append(row)
        put(self, row)

    async with running_server(tmp_path) as server:
        await ask(server)
        monkeypatch.setattr(database.Database, "put", counted)
        with locked(tmp_path):
            answers = await asyncio.gather(*(server.post(PATH, {"input": "hi"}) for _ in range(20)))
        assert all("locked" in answer.headers[NOT_STORED] for answer in answers)
    assert len(tried) <= 4  # by two threads


async def test_the_queue_of_the_store_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "LOCK_SECONDS", 1000.0)
    monkeypatch.setattr(worker, "_MAX_WAITING", 3)
    async with running_server(tmp_path) as server:
        await ask(server)
        with locked(tmp_path):
            waiting = [asyncio.create_task(server.post(PATH, {"input": "hi"})) for _ in range(8)]
            async with asyncio.timeout(60):
                while sum(task.done() for task in waiting) < 4:
                    await asyncio.sleep(0.005)
            refused = [task.result() for task in waiting if task.done()]
        assert all(answer.status_code == 200 for answer in await asyncio.gather(*waiting))
        assert all("operations waiting" in answer.headers[NOT_STORED] for answer in refused)


async def test_nobody_waits_for_a_store_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "LOCK_SECONDS", 1000.0)
    monkeypatch.setattr(worker, "_TIMEOUT", 0.1)
    async with running_server(tmp_path) as server:
        await ask(server)
        with locked(tmp_path):
            answer = await server.post(PATH, {"input": "hi"})
            assert "did not answer" in answer.headers[NOT_STORED]
        await until_health(server, None)


async def test_a_locked_store_is_closed_in_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "LOCK_SECONDS", 1000.0)
    monkeypatch.setattr(worker, "_CLOSE_SECONDS", 0.1)
    responses = ResponseStore(f"sqlite:///{tmp_path / 'responses.db'}", 0)
    assert await responses.load("resp_x", "") is None
    with locked(tmp_path):
        saving = [asyncio.create_task(responses.save(stored(str(number)))) for number in range(10)]
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await responses.aclose()
            results = await asyncio.gather(*saving, return_exceptions=True)
    assert all("store of responses" in str(result) for result in results)


async def test_opening_says_which_database_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no database\n" * 100)
    for url in (f"sqlite:///{tmp_path}/file", f"sqlite:///{tmp_path}", f"sqlite:///{tmp_path}/no/such/file"):
        async with closing_store(url) as responses:
            with pytest.raises(Exception, match=f"--response-store: {url}"):
                await responses.open()
    async with closing_store("nothing://me:secret@host/x") as responses:
        with pytest.raises(Exception, match=r"//me:\*\*\*@host/x") as failed:
            await responses.open()
    assert "secret" not in str(failed.value)


async def test_a_conversation_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_CONVERSATION", 50)
    async with closing_store(f"sqlite:///{tmp_path / 'responses.db'}") as responses:
        before = None
        for number in range(51):
            await responses.save(stored(f"resp_{number}", before))
            before = f"resp_{number}"
        operations = []
        run = responses._worker.run

        async def counted(work: Any, *, write: bool) -> Any:
            operations.append(work)
            return await run(work, write=write)

        monkeypatch.setattr(responses._worker, "run", counted)
        rows = await responses.conversation("resp_49", "", 1 << 20)
        assert [row.id for row in rows] == [f"resp_{number}" for number in range(50)]
        assert len(operations) == 1
        with pytest.raises(Exception, match="too long: it may have 50 responses"):
            await responses.conversation("resp_50", "", 1 << 20)
        with pytest.raises(Exception, match="and 100 bytes"):
            await responses.conversation("resp_3", "", 100)
        await responses.save(stored("resp_0", "resp_49"))  # a cycle, which no client can make
        with pytest.raises(Exception, match="too long"):
            await responses.conversation("resp_49", "", 1 << 20)
        await responses.delete("resp_20", "")
        with pytest.raises(NoSuchResponse, match="'resp_20', an earlier part of the conversation of 'resp_49'"):
            await responses.conversation("resp_49", "", 1 << 20)


async def test_what_a_client_sees_of_a_conversation_that_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_CONVERSATION", 2)
    async with running_server(tmp_path) as server:
        first = await ask(server, "a")
        second = await ask(server, "b", previous_response_id=first["id"])
        third = await ask(server, "c", previous_response_id=second["id"])
        answer = await server.post(PATH, {"input": "d", "previous_response_id": third["id"]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "previous_response_id")
        await server.http.delete(f"{PATH}/{first['id']}")
        answer = await server.post(PATH, {"input": "d", "previous_response_id": second["id"]})
        assert answer.status_code == 404
        assert first["id"] in answer.json()["error"]["message"]
        listed = await server.http.get(f"{PATH}/{second['id']}/input_items")
        assert listed.status_code == 404


@pytest.mark.parametrize("name", ["x", "resp_%00", "resp_%F0%9F%98%80", "%27%20OR%201=1", "..%2F..%2Fx", "x" * 5000])
async def test_odd_names_are_of_no_response(tmp_path: Path, name: str) -> None:
    async with running_server(tmp_path) as server:
        for answer in (
            await server.http.get(f"{PATH}/{name}"),
            await server.http.get(f"{PATH}/{name}/input_items"),
            await server.http.delete(f"{PATH}/{name}"),
            await server.http.post(f"{PATH}/{name}/cancel"),
            await server.post(PATH, {"input": "x", "previous_response_id": name}),
        ):
            assert answer.status_code in (404, 405)
            assert len(answer.text) < 1000


def closing_store(url: str) -> Any:
    return aclosing(ResponseStore(url, 0))


def stored(name: str, before: str | None = None) -> StoredResponse:
    response = {"id": name, "created_at": 1, "status": "completed", "output": [], "previous_response_id": before}
    items = [{"id": f"msg_{name}", "type": "message", "content": "x\n[y]"}]
    return StoredResponse(owner="", response=response, items=items)
