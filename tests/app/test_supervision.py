"""What happens when an engine dies: the server gives up, or the engine is started again behind the same client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from quire.app import supervision
from quire.app.supervision import DeathPolicy, supervise
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.launch import CoreEntry, ThreadCore
from quire.engine.client.protocol import CoreDied
from quire.engine.client.transport import ClientChannel, CoreChannel
from tests.support.fake_core import FakeCore, says
from tests.support.server import Server, running_server, until

COMPLETIONS = "/v1/completions"
REQUEST = {"prompt": "x", "max_tokens": 50}


def cannot_be_loaded(address: str) -> None:
    """A core whose model is gone."""
    with CoreChannel(address) as channel:
        channel.send(CoreDied("no such file"))


class Engine:
    """An engine whose later cores are given."""

    def __init__(self, client: EngineClient, later: list[CoreEntry]) -> None:
        self.client = client
        self.restarts = 0
        self._later = later
        self._handles: list[ThreadCore] = []

    async def restart(self) -> None:
        self.restarts += 1
        core = self._later.pop(0) if self._later else cannot_be_loaded
        handle = ThreadCore()
        self._handles.append(handle)
        await self.client.reconnect(ClientChannel(handle.address))
        handle.start(core, self.client.fail)
        await self.client.ready()

    async def close(self) -> None:
        await self.client.close()
        for handle in self._handles:
            await handle.join(60)


@asynccontextmanager
async def supervised(
    folder: Path, first: FakeCore, *later: CoreEntry, policy: DeathPolicy
) -> AsyncIterator[tuple[Server, Engine, list[str]]]:
    """A server whose engine dies, and what was given as the reason to give up."""
    async with running_server(folder, first) as server:
        client = server.state.models[0].client
        assert isinstance(client, EngineClient)
        engine, given_up = Engine(client, list(later)), list[str]()
        task = asyncio.create_task(supervise(engine, lambda: policy, server.state, given_up.append))
        try:
            yield server, engine, given_up
        finally:
            task.cancel()
            await engine.close()


@pytest.fixture
def slow_restart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes restarts wait until the returned function is called."""
    gate = asyncio.Event()

    class Clock:
        def __getattr__(self, name: str) -> object:
            return getattr(asyncio, name)

        async def sleep(self, _: float) -> None:
            await gate.wait()

    monkeypatch.setattr(supervision, "asyncio", Clock())
    return gate.set


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_FIRST_DELAY", 0.0)


async def test_without_restarts_the_server_gives_up_at_the_first_death(tmp_path: Path) -> None:
    async with supervised(tmp_path, FakeCore(die_at_step=1), policy="exit") as (server, engine, given_up):
        answer = await server.post(COMPLETIONS, REQUEST)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        await until(lambda: given_up)
        assert "told to die" in given_up[0]
        assert engine.restarts == 0


async def test_requests_during_a_restart_are_told_so_and_later_ones_are_served(
    tmp_path: Path, slow_restart: Callable[[], None]
) -> None:
    cores = FakeCore(die_at_step=1), FakeCore(answer=says("back"))
    async with supervised(tmp_path, *cores, policy="restart") as (server, _, given_up):
        assert (await server.post(COMPLETIONS, REQUEST)).status_code == 503
        await until(lambda: "restarted" in str(server.state.models[0].client.dead))
        for path in ("/health", "/ready"):
            answer = await server.http.get(path)
            assert answer.status_code == 503
            assert "told to die" in answer.json()["error"]["message"]
            assert "being restarted (attempt 1 of 5)" in answer.json()["error"]["message"]
        answer = await server.post(COMPLETIONS, REQUEST)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        slow_restart()
        await until(lambda: server.state.models[0].client.dead is None)
        assert (await server.post(COMPLETIONS, REQUEST)).json()["choices"][0]["text"].startswith("back")
        assert (await server.http.get("/health")).status_code == 200
        page = (await server.http.get("/metrics")).text
        assert 'quire:engine_restarts_total{engine="0",model_name="fake"} 1.0' in page
        assert server.state.models[0].client.slots_in_use == 0
        assert not given_up


async def test_an_engine_that_dies_again_and_again_is_given_up(tmp_path: Path, at_once: None) -> None:
    """Deaths while running and failures to load count alike."""
    later = FakeCore(die_at_step=1), cannot_be_loaded, cannot_be_loaded, FakeCore(die_at_step=1)
    async with supervised(tmp_path, FakeCore(die_at_step=1), *later, policy="restart") as (server, engine, given_up):
        while not given_up:
            assert (await server.post(COMPLETIONS, REQUEST)).status_code == 503
        assert engine.restarts == 5
        assert "no such file" in given_up[0]


async def test_an_engine_that_ran_for_long_starts_again_with_the_first_attempt(
    tmp_path: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "_STABLE_AFTER", -1.0)
    later = [FakeCore(die_at_step=1) for _ in range(8)]
    async with supervised(tmp_path, FakeCore(die_at_step=1), *later, policy="restart") as (server, engine, given_up):
        while engine.restarts < 8:
            assert (await server.post(COMPLETIONS, REQUEST)).status_code == 503
        assert not given_up


async def test_a_server_that_drains_restarts_nothing(tmp_path: Path, at_once: None) -> None:
    async with supervised(tmp_path, FakeCore(), policy="restart") as (server, engine, given_up):
        server.state.draining = True
        server.state.models[0].client.fail("the server is shutting down")
        for _ in range(10):
            await asyncio.sleep(0)
        assert engine.restarts == 0
        assert not given_up
