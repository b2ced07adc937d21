"""/sleep, /wake_up and /is_sleeping."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quire.engine.client.protocol import Sleep, Wake
from quire.engine.client.sleep import SleepControl
from tests.support.fake_core import FakeCore, says
from tests.support.server import Server, chunks_of, running_server, until

COMPLETIONS = "/v1/completions"
SHORT = {"prompt": "abc", "max_tokens": 5}


def changes(core: FakeCore) -> list[object]:
    """The messages about sleep that a core has received."""
    return [message for message in core.received if isinstance(message, Sleep | Wake)]


def control_of(server: Server) -> SleepControl:
    """What puts the server's only core to sleep."""
    control = server.state.models[0].client.sleeping
    assert isinstance(control, SleepControl)
    return control


async def is_sleeping(server: Server) -> Any:
    return (await server.http.get("/is_sleeping")).json()


async def test_a_server_sleeps_and_wakes_up(tmp_path: Path) -> None:
    core, other = FakeCore(), FakeCore()
    async with running_server(tmp_path, core, other, enable_sleep_mode=True) as server:
        assert await is_sleeping(server) == {"is_sleeping": False}
        for path, expected in (("/sleep", Sleep(1)), ("/sleep?level=2", Sleep(2))):
            answer = await server.post(path)
            assert (answer.status_code, answer.content) == (200, b"")
            assert await is_sleeping(server) == {"is_sleeping": True}
            assert changes(core)[-1] == changes(other)[-1] == expected  # every model sleeps
        for model in ("fake", "fake-1"):
            refused = await server.post(COMPLETIONS, {**SHORT, "model": model})
            assert refused.status_code == 503
            assert "/wake_up" in refused.json()["error"]["message"]
        assert (await server.http.get("/health")).status_code == 200
        assert (await server.http.get("/ready")).status_code == 503
        for path in ("/v1/models", "/metrics", "/version"):
            assert (await server.http.get(path)).status_code == 200
        answer = await server.post("/wake_up")
        assert (answer.status_code, answer.content) == (200, b"")
        assert changes(core)[-1] == Wake(frozenset(("weights", "kv_cache")))
        assert await is_sleeping(server) == {"is_sleeping": False}
        assert (await server.http.get("/ready")).status_code == 200
        assert (await server.post(COMPLETIONS, SHORT)).json()["choices"][0]["text"] == "ABC"


async def test_tags_are_passed_on(tmp_path: Path) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core, enable_sleep_mode=True) as server:
        for query in ("tags=weights", "tags=kv_cache", "tags=weights&tags=kv_cache"):
            await server.post("/sleep")
            assert (await server.post(f"/wake_up?{query}")).status_code == 200
        woken = [set(message.tags) for message in changes(core) if isinstance(message, Wake)]
        assert woken == [{"weights"}, {"kv_cache"}, {"weights", "kv_cache"}]


async def test_running_requests_are_told(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 50))
    core.hold.set()
    async with running_server(tmp_path, core, enable_sleep_mode=True) as server:
        bodies = ({**SHORT, "max_tokens": 40}, {**SHORT, "max_tokens": 40, "stream": True})
        tasks = [asyncio.create_task(server.post(COMPLETIONS, body)) for body in bodies]
        await until(lambda: len(core.active) == 2)
        assert (await server.post("/sleep")).status_code == 200
        plain, stream = [await task for task in tasks]
        assert plain.status_code == 503
        assert "/sleep" in plain.json()["error"]["message"]
        assert "/sleep" in chunks_of(stream.text)[-1]["error"]["message"]


async def test_with_mode_wait_running_requests_end_first(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 5))
    core.hold.set()
    async with running_server(tmp_path, core, enable_sleep_mode=True) as server:
        running = asyncio.create_task(server.post(COMPLETIONS, SHORT))
        await until(lambda: core.active)
        sleeping = asyncio.create_task(server.post("/sleep?mode=wait"))
        await until(lambda: control_of(server).refusal_of_new)
        assert (await server.post(COMPLETIONS, SHORT)).status_code == 503
        core.hold.clear()
        assert (await running).json()["choices"][0]["text"] == "x" * 5
        assert (await sleeping).status_code == 200
        assert await is_sleeping(server) == {"is_sleeping": True}


async def test_a_client_that_disconnects_ends_the_wait(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 5))
    core.hold.set()
    async with running_server(tmp_path, core, enable_sleep_mode=True) as server:
        control = control_of(server)
        running = asyncio.create_task(server.post(COMPLETIONS, SHORT))
        await until(lambda: core.active)
        sleeping = asyncio.create_task(server.post("/sleep?mode=wait"))
        await until(lambda: control.refusal_of_new)
        sleeping.cancel()
        await until(lambda: control.refusal_of_new is None)
        core.hold.clear()
        for answer in (await running, await server.post(COMPLETIONS, SHORT)):
            assert answer.json()["choices"][0]["text"] == "x" * 5
        assert await is_sleeping(server) == {"is_sleeping": False}
        assert not changes(core)


@pytest.mark.parametrize(
    ("path", "param", "part"),
    [
        ("/sleep?level=3", "level", "less than or equal to 2"),
        ("/sleep?level=0", "level", "greater than or equal to 1"),
        ("/sleep?level=deep", "level", "integer"),
        ("/sleep?mode=keep", "mode", "'abort' or 'wait'"),
        ("/wake_up?tags=weights&tags=graphs", "tags", "'weights' or 'kv_cache'"),
    ],
)
async def test_wrong_parameters_are_named(tmp_path: Path, path: str, param: str, part: str) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core, enable_sleep_mode=True) as server:
        answer = await server.post(path)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert part in answer.json()["error"]["message"]
        assert not changes(core)


async def test_without_the_flag_nothing_sleeps(tmp_path: Path) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        for path in ("/sleep", "/wake_up"):
            answer = await server.post(path)
            assert answer.status_code == 400
            assert "--enable-sleep-mode" in answer.json()["error"]["message"]
        assert await is_sleeping(server) == {"is_sleeping": False}
        assert not changes(core)


async def test_a_model_that_cannot_wake_up_is_reported(tmp_path: Path) -> None:
    core = FakeCore(wake_error="The model could not be woken: no memory")
    async with running_server(tmp_path, FakeCore(), core, enable_sleep_mode=True) as server:
        await server.post("/sleep")
        answer = await server.post("/wake_up")
        assert answer.status_code == 503
        assert "no memory" in answer.json()["error"]["message"]
        assert await is_sleeping(server) == {"is_sleeping": True}
        assert (await server.post(COMPLETIONS, SHORT)).status_code == 200  # the first model is awake
