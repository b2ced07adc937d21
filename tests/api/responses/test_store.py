"""The database of stored responses."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.responses import PATH, ask
from tests.support.server import running_server


async def test_responses_expire(tmp_path: Path) -> None:
    async with running_server(tmp_path, response_ttl=1e-6) as server:
        body = await ask(server)
        assert (await server.http.get(f"{PATH}/{body['id']}")).status_code == 404


async def test_a_store_that_fails_is_said(tmp_path: Path) -> None:
    async with running_server(tmp_path, response_store=f"sqlite:///{tmp_path}/no/such/folder.db") as server:
        answer = await server.post(PATH, {"input": "hi"})
        assert answer.status_code == 503
        assert "store" in answer.json()["error"]["message"]
        assert (await ask(server, store=False))["status"] == "completed"


async def test_responses_in_memory(tmp_path: Path) -> None:
    async with running_server(tmp_path, response_store="sqlite://") as server:
        bodies = await asyncio.gather(*(ask(server, str(number)) for number in range(20)))
        found = await asyncio.gather(*(server.http.get(f"{PATH}/{body['id']}") for body in bodies))
    assert [one.json() for one in found] == bodies
