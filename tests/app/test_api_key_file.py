"""--api-key-file: clients with names, whose keys are replaced and removed while the server runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from quire.app.serve import run
from quire.config.command import ConfigError
from quire.config.commands import Serve
from quire.config.key_file import KeyFileError
from tests.support.fake_core import FakeCore
from tests.support.keys import bearer, sha256_of, write_keys
from tests.support.realtime import speech_server
from tests.support.server import running_server, until


async def test_a_removed_key_is_refused_and_its_stream_goes_on(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    path = write_keys(tmp_path / "keys.toml", alice={}, bob={})
    async with running_server(tmp_path, core, api_key_file=path) as server:
        body = {"prompt": "abc", "stream": True}
        running = asyncio.create_task(server.post("/v1/completions", body, headers=bearer("alice")))
        await until(lambda: core.active)
        write_keys(path, bob={}, carol={})
        server.keys.read()
        for name, status in (("alice", 401), ("bob", 200), ("carol", 200), ("nobody", 401)):
            assert (await server.http.get("/v1/models", headers=bearer(name))).status_code == status, name
        core.hold.clear()
        assert (await running).text.endswith("data: [DONE]\n\n")


async def test_a_file_that_cannot_be_used_changes_nothing(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys.toml", alice={})
    async with running_server(tmp_path, api_key_file=path) as server:
        for content in ("[bob]\nsha256 = 1", "not TOML", "[api-key-1]", ""):
            path.write_text(content)
            if content:
                with pytest.raises(KeyFileError):
                    server.keys.read()
                assert (await server.http.get("/v1/models", headers=bearer("alice"))).status_code == 200
        server.keys.read()  # an empty file is a file without keys
        assert (await server.http.get("/v1/models", headers=bearer("alice"))).status_code == 401
        assert (await server.http.get("/v1/models")).status_code == 401


async def test_a_client_keeps_its_responses_when_its_key_is_replaced(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys.toml", alice={}, bob={})
    async with running_server(tmp_path, api_key_file=path) as server:
        made = await server.post("/v1/responses", {"input": "x"}, headers=bearer("alice"))
        url = f"/v1/responses/{made.json()['id']}"
        path.write_text(f"[alice]\nsha256 = ['{sha256_of('key-alice')}', '{sha256_of('key-new')}']\n")
        server.keys.read()
        for name, status in (("alice", 200), ("new", 200), ("bob", 401)):
            assert (await server.http.get(url, headers=bearer(name))).status_code == status
        write_keys(path, new={})
        server.keys.read()
        assert (await server.http.get(url, headers=bearer("new"))).status_code == 404, "the key of another client"


async def test_clients_of_a_file_are_tenants(tmp_path: Path) -> None:
    """A single one as well, as it has a name."""
    core = FakeCore()
    core.hold.set()
    path = write_keys(tmp_path / "keys.toml", alice={})
    settings: dict[str, Any] = {"api_key_file": path, "api_key": ("shared",), "max_client_share": 0.75}
    async with running_server(tmp_path, core, capacity=4, **settings) as server:
        tasks = [
            asyncio.create_task(server.post("/v1/completions", {"prompt": "x"}, headers=bearer("alice")))
            for _ in range(4)
        ]
        await until(lambda: any(task.done() for task in tasks))
        core.hold.clear()
        assert sorted([(await task).status_code for task in tasks]) == [200, 200, 200, 429]


async def test_a_removed_key_ends_its_client_secrets(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys.toml", alice={}, bob={})
    async with speech_server(tmp_path, api_key_file=path) as server:
        url = server.url.replace("http", "ws") + "/v1/realtime?model=fake"
        answer = await server.post("/v1/realtime/client_secrets", {}, headers=bearer("alice"))
        secret = {"authorization": f"Bearer {answer.json()['value']}"}
        async with connect(url, additional_headers=secret) as session:
            await session.recv()
            write_keys(path, bob={})
            server.keys.read()
            with pytest.raises(InvalidStatus) as refused:
                await connect(url, additional_headers=secret)
            assert refused.value.response.status_code == 401
            await session.send('{"type": "input_audio_buffer.clear"}')
            assert "cleared" in str(await session.recv())


def test_keys_that_contradict_each_other_are_refused_at_start(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys.toml", alice={})
    keys = ["--api-key-file", str(path)]
    for arguments, complaint in (
        (["--api-key", "x", "--admin-api-key", "x"], "a key of --admin-api-key is one of --api-key"),
        ([*keys, "--api-key", "key-alice"], "[api-key-1] and [alice] have the same key"),
        ([*keys, "--admin-api-key", "key-alice"], "[admin-api-key-1] and [alice] have the same key"),
        (["--api-key-file", str(tmp_path / "none.toml")], "none.toml cannot be read: No such file"),
        (["--api-key-file", str(tmp_path)], "cannot be read: Is a directory"),
        (["--requests-per-minute", "5"], "--requests-per-minute needs --api-key or --api-key-file"),
        (["--admin-api-key", "x", "--max-concurrent-requests", "5"], "--max-concurrent-requests needs --api-key"),
        (["--admin-api-key", ""], "--admin-api-key expects non-empty strings"),
    ):
        with pytest.raises(ConfigError) as error:
            run(Serve.parse(["model", *arguments]))
        assert complaint in str(error.value), arguments
