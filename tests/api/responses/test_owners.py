"""Whose stored responses are: for another key they do not exist."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_core import FakeCore
from tests.support.responses import PATH
from tests.support.server import Server, running_server, until

KEYS = ("key-of-a", "key-of-b")


async def call(server: Server, key: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = await server.http.request(method, f"{PATH}{path}", json=body, headers=headers)
    return answer.status_code, answer.json()


async def created(server: Server, key: str, **fields: Any) -> str:
    status, body = await call(server, key, "POST", "", {"input": "hi", **fields})
    assert status == 200, body
    return str(body["id"])


def uses(response_id: str) -> list[tuple[str, str, Any]]:
    """All that a client can do with a response that it knows."""
    return [
        ("GET", f"/{response_id}", None),
        ("GET", f"/{response_id}?stream=true", None),
        ("GET", f"/{response_id}/input_items", None),
        ("POST", f"/{response_id}/cancel", None),
        ("POST", "", {"input": "go on", "previous_response_id": response_id}),
        ("POST", "", {"input": "go on", "previous_response_id": response_id, "stream": True}),
        ("DELETE", f"/{response_id}", None),
    ]


async def assert_unknown_to(server: Server, key: str, response_id: str) -> None:
    for method, path, body in uses(response_id):
        status, refusal = await call(server, key, method, path, body)
        unknown = "resp_" + "0" * 32
        path, body = path.replace(response_id, unknown), body and {**body, "previous_response_id": unknown}
        same = await call(server, key, method, path, body)
        assert status == 404
        assert (status, refusal["error"]["message"].replace(response_id, unknown)) == (
            same[0],
            same[1]["error"]["message"],
        )


@pytest.mark.parametrize("store", [None, "sqlite://"])
async def test_a_response_is_that_of_its_key(tmp_path: Path, store: str | None) -> None:
    async with running_server(tmp_path, api_key=KEYS, response_store=store) as server:
        first = await created(server, KEYS[0])
        await assert_unknown_to(server, KEYS[1], first)
        second = await created(server, KEYS[0], previous_response_id=first)
        status, items = await call(server, KEYS[0], "GET", f"/{second}/input_items")
        assert (status, len(items["data"])) == (200, 3)
        assert (await call(server, KEYS[0], "DELETE", f"/{first}"))[0] == 200


async def test_a_response_that_is_generated_is_that_of_its_key(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core, api_key=KEYS) as server:
        running = await created(server, KEYS[0], background=True)
        await until(lambda: server.state.models[0].client.open_streams == 1)
        await assert_unknown_to(server, KEYS[1], running)
        status, body = await call(server, KEYS[0], "POST", f"/{running}/cancel")
        assert (status, body["status"]) == (200, "cancelled")
        await assert_unknown_to(server, KEYS[1], running)
        core.hold.clear()


async def test_responses_stay_with_their_key_after_a_restart(tmp_path: Path) -> None:
    """Also if the keys have another order. What was made without a key is everybody's."""
    async with running_server(tmp_path) as server:
        without_key = await created(server, "")
    async with running_server(tmp_path, api_key=KEYS) as server:
        of_a, of_b = [await created(server, key) for key in KEYS]
    async with running_server(tmp_path, api_key=(KEYS[1], KEYS[0])) as server:
        for key, response, other in ((KEYS[0], of_a, of_b), (KEYS[1], of_b, of_a)):
            assert (await call(server, key, "GET", f"/{response}"))[0] == 200
            assert (await call(server, key, "GET", f"/{without_key}"))[0] == 200
            await assert_unknown_to(server, key, other)
    async with running_server(tmp_path) as server:
        assert (await call(server, "", "GET", f"/{without_key}"))[0] == 200
        await assert_unknown_to(server, "", of_a)


async def test_a_key_in_another_encoding_is_the_same_key(tmp_path: Path) -> None:
    async with running_server(tmp_path, api_key=("clé", "b")) as server:
        made = await created_with(server, "clé".encode())
        answer = await server.http.get(f"{PATH}/{made}", headers={b"authorization": "Bearer clé".encode("latin-1")})
        assert answer.status_code == 200


async def created_with(server: Server, key: bytes) -> str:
    headers = {b"authorization": b"Bearer " + key, b"content-type": b"application/json"}
    answer = await server.http.post(PATH, content=b'{"input": "hi"}', headers=headers)
    return str(answer.json()["id"])


async def test_the_store_has_no_key(tmp_path: Path) -> None:
    async with running_server(tmp_path, api_key=KEYS) as server:
        await created(server, KEYS[0])
    with closing(sqlite3.connect(tmp_path / "responses.db")) as database:
        dump = "\n".join(str(row) for row in database.execute("SELECT * FROM quire_responses"))
    assert "resp_" in dump
    assert KEYS[0] not in dump
