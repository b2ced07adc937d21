"""/pause and /resume, resets of caches, /update_weights, profiles."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quire.engine.client.protocol import (
    Command,
    Pause,
    ResetCaches,
    Resume,
    RunCommand,
    StartProfile,
    StopProfile,
    UpdateWeights,
)
from tests.support.fake_core import FakeCore, says
from tests.support.server import Server, chunks_of, running_server, until

COMPLETIONS = "/v1/completions"
SHORT = {"prompt": "abc", "max_tokens": 5}
LONG = {**SHORT, "max_tokens": 40}


def commands(core: FakeCore) -> list[Command]:
    """What an operator has asked of a core."""
    return [message.command for message in core.received if isinstance(message, RunCommand)]


async def is_paused(server: Server, query: str = "") -> bool:
    answer: dict[str, bool] = (await server.http.get(f"/is_paused{query}")).json()
    return answer["is_paused"]


async def test_caches_are_reset(tmp_path: Path) -> None:
    core, other = FakeCore(), FakeCore()
    async with running_server(tmp_path, core, other) as server:
        for path, expected in (
            ("/reset_prefix_cache", ResetCaches(prefixes=True)),
            ("/reset_prefix_cache?reset_running_requests=true", ResetCaches(prefixes=True, preempt=True)),
            ("/reset_prefix_cache?reset_external=true", ResetCaches(prefixes=True, external=True)),
            ("/reset_encoder_cache", ResetCaches(items=True)),
        ):
            answer = await server.post(path)
            assert (answer.status_code, answer.content) == (200, b"")
            assert commands(core)[-1] == commands(other)[-1] == expected
        assert (await server.post("/reset_mm_cache")).status_code == 200
        before = len(commands(core))
        assert (await server.post("/reset_prefix_cache?model=fake-1")).status_code == 200
        assert len(commands(core)) == before


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/reset_prefix_cache?reset_external=perhaps", 400, "reset_external"),
        ("/reset_prefix_cache?reset_running_requests=perhaps", 400, "reset_running_requests"),
        ("/reset_encoder_cache?model=none", 404, "model"),
        ("/reset_mm_cache?model=none", 404, "model"),
        ("/pause?mode=slowly", 400, "mode"),
        ("/pause?model=none", 404, "model"),
        ("/resume?model=none", 404, "model"),
    ],
)
async def test_wrong_parameters_are_named(tmp_path: Path, path: str, status: int, param: str) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        answer = await server.post(path)
        assert answer.status_code == status
        assert answer.json()["error"]["param"] == param
        assert not commands(core)


async def test_what_an_engine_cannot_do_now_is_a_conflict(tmp_path: Path) -> None:
    core = FakeCore(command_error=("not now", False))
    async with running_server(tmp_path, core) as server:
        for path in ("/reset_prefix_cache", "/reset_encoder_cache", "/pause"):
            answer = await server.post(path)
            assert answer.status_code == 409
            assert answer.json()["error"]["message"] == "not now"
        core.command_error = None


async def test_a_paused_server_lets_requests_wait(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 5))
    async with running_server(tmp_path, core, FakeCore()) as server:
        assert not await is_paused(server)
        answer = await server.post("/pause")
        assert (answer.status_code, answer.json()) == (200, {"status": "paused"})
        assert await is_paused(server)
        assert commands(core) == [Pause(), ResetCaches(prefixes=True), ResetCaches(items=True)]
        waiting = asyncio.create_task(server.post(COMPLETIONS, SHORT))
        await until(lambda: core.active)
        assert (await server.http.get("/health")).status_code == 200
        ready = await server.http.get("/ready")
        assert ready.status_code == 503
        assert "/resume" in ready.json()["error"]["message"]
        assert not waiting.done()
        answer = await server.post("/resume")
        assert (answer.status_code, answer.json()) == (200, {"status": "resumed"})
        assert (await waiting).json()["choices"][0]["text"] == "x" * 5
        assert not await is_paused(server)
        assert (await server.http.get("/ready")).status_code == 200


async def test_one_model_is_paused(tmp_path: Path) -> None:
    core, other = FakeCore(), FakeCore()
    async with running_server(tmp_path, core, other) as server:
        assert (await server.post("/pause?model=fake-1&clear_cache=false")).status_code == 200
        assert (commands(core), commands(other)) == ([], [Pause()])
        assert [await is_paused(server, query) for query in ("?model=fake", "?model=fake-1", "")] == [False, True, True]
        assert (await server.post(COMPLETIONS, SHORT)).json()["choices"][0]["text"] == "ABC"


async def test_a_full_queue_refuses_requests_of_a_paused_server(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore(), capacity=1) as server:
        await server.post("/pause")
        waiting = asyncio.create_task(server.post(COMPLETIONS, SHORT))
        await until(lambda: server.state.models[0].client.slots_in_use)
        refused = await server.post(COMPLETIONS, SHORT)
        assert refused.status_code == 503
        assert "Retry-After" in refused.headers
        await server.post("/resume")
        assert (await waiting).status_code == 200


async def test_running_requests_are_aborted(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 50))
    core.hold.set()
    async with running_server(tmp_path, core) as server:
        tasks = [asyncio.create_task(server.post(COMPLETIONS, {**LONG, "stream": stream})) for stream in (False, True)]
        await until(lambda: len(core.active) == 2)
        assert (await server.post("/pause?mode=abort")).status_code == 200
        plain, stream = [await task for task in tasks]
        assert plain.status_code == 503
        assert "/pause" in plain.json()["error"]["message"]
        assert "/pause" in chunks_of(stream.text)[-1]["error"]["message"]
        assert not core.active


async def test_running_requests_are_kept(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 40))
    core.hold.set()
    async with running_server(tmp_path, core) as server:
        running = asyncio.create_task(server.post(COMPLETIONS, LONG))
        await until(lambda: core.active)
        core.allow(3)
        await until(lambda: core.steps == 3)
        assert (await server.post("/pause?mode=keep")).status_code == 200
        assert commands(core) == [Pause()]  # the caches are kept
        core.hold.clear()
        assert not running.done()
        await server.post("/resume")
        assert (await running).json()["choices"][0]["text"] == "x" * 40


@pytest.mark.parametrize("query", ["mode=wait", "wait_for_inflight_requests=true"])
async def test_running_requests_end_first(tmp_path: Path, query: str) -> None:
    core = FakeCore(answer=says("x" * 5))
    core.hold.set()
    async with running_server(tmp_path, core) as server:
        running = asyncio.create_task(server.post(COMPLETIONS, SHORT))
        await until(lambda: core.active)
        pausing = asyncio.create_task(server.post(f"/pause?{query}"))
        await until(lambda: commands(core))
        assert await is_paused(server)
        core.hold.clear()
        assert (await running).json()["choices"][0]["text"] == "x" * 5
        assert (await pausing).json() == {"status": "paused"}
        assert commands(core)[0] == Pause(drain=True)


async def test_a_client_that_disconnects_ends_the_wait(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 5))
    core.hold.set()
    async with running_server(tmp_path, core) as server:
        running = asyncio.create_task(server.post(COMPLETIONS, SHORT))
        await until(lambda: core.active)
        pausing = asyncio.create_task(server.post("/pause?mode=wait"))
        await until(lambda: commands(core))
        pausing.cancel()
        await until(lambda: commands(core)[-1] == Resume())
        assert not await is_paused(server)
        core.hold.clear()
        assert (await running).status_code == 200


async def test_two_clients_wait_and_one_of_them_disconnects(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 5))
    core.hold.set()
    async with running_server(tmp_path, core) as server:
        running = asyncio.create_task(server.post(COMPLETIONS, SHORT))
        await until(lambda: core.active)
        leaving, staying = [asyncio.create_task(server.post("/pause?mode=wait&clear_cache=false")) for _ in range(2)]
        await until(lambda: len(commands(core)) == 2)
        leaving.cancel()
        await until(lambda: server.state.in_flight == 2)
        core.hold.clear()
        assert (await running).status_code == 200
        assert (await staying).json() == {"status": "paused"}
        assert commands(core) == [Pause(drain=True)] * 2
        assert core.paused
        assert await is_paused(server)


async def test_a_client_that_disconnects_leaves_all_models_as_they_were(tmp_path: Path) -> None:
    """Also the one that was idle, so that it has paused at once, and the one that was paused before."""
    busy, idle, paused = cores = [FakeCore(answer=says("x" * 5)) for _ in range(3)]
    busy.hold.set()
    async with running_server(tmp_path, *cores) as server:
        await server.post("/pause?model=fake-2&clear_cache=false")
        running = asyncio.create_task(server.post(COMPLETIONS, SHORT))
        await until(lambda: busy.active)
        pausing = asyncio.create_task(server.post("/pause?mode=wait"))
        await until(lambda: commands(busy) and ResetCaches(items=True) in commands(idle))
        await until(lambda: ResetCaches(items=True) in commands(paused))
        pausing.cancel()
        await until(lambda: server.state.in_flight == 1)
        answers = [await is_paused(server, f"?model={name}") for name in ("fake", "fake-1", "fake-2")]
        assert answers == [False, False, True]
        await until(lambda: commands(idle)[-1] == Resume())
        await until(lambda: commands(paused)[-1] == Pause())
        busy.hold.clear()
        assert (await running).status_code == 200
        assert (await server.post(COMPLETIONS, {**SHORT, "model": "fake-1"})).status_code == 200


async def test_a_pause_during_an_update_stays(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 5))
    core.hold.set()
    async with running_server(tmp_path, core, weight_update_path=tmp_path) as server:
        running = asyncio.create_task(server.post(COMPLETIONS, SHORT))
        await until(lambda: core.active)
        updating = asyncio.create_task(server.post("/update_weights", {"path": "new"}))
        await until(lambda: commands(core))
        pausing = asyncio.create_task(server.post("/pause?mode=wait&clear_cache=false"))
        await until(lambda: len(commands(core)) == 2)
        core.hold.clear()
        assert [(await task).status_code for task in (running, updating, pausing)] == [200] * 3
        assert core.paused
        assert await is_paused(server)
        await server.post("/resume")
        assert (await server.post(COMPLETIONS, SHORT)).status_code == 200


async def test_an_update_waits_for_requests_beside_a_pause_that_waits(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 5))
    core.hold.set()
    async with running_server(tmp_path, core, weight_update_path=tmp_path) as server:
        running = asyncio.create_task(server.post(COMPLETIONS, SHORT))
        await until(lambda: core.active)
        pausing = asyncio.create_task(server.post("/pause?mode=wait&clear_cache=false"))
        await until(lambda: commands(core))
        updating = asyncio.create_task(server.post("/update_weights", {"path": "new"}))
        await until(lambda: len(commands(core)) == 2)
        assert commands(core) == [Pause(drain=True), Pause(drain=True, is_temporary=True)]
        core.hold.clear()
        assert [(await task).status_code for task in (running, pausing, updating)] == [200] * 3
        assert await is_paused(server)


async def test_a_pause_of_a_dead_engine_is_none(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 5), die_at_step=1)
    async with running_server(tmp_path, core) as server:
        assert (await server.post(COMPLETIONS, SHORT)).status_code == 503
        assert (await server.post("/pause")).status_code == 503
        assert not await is_paused(server), "the one that is started in its place is not"


async def test_a_paused_server_does_not_wait_for_requests_before_it_sleeps(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore(), enable_sleep_mode=True) as server:
        await server.post("/pause?mode=keep")
        answer = await server.post("/sleep?mode=wait")
        assert answer.status_code == 409
        assert "/resume" in answer.json()["error"]["message"]
        assert (await server.post("/sleep")).status_code == 200


@pytest.mark.parametrize("spelling", ["new", "./new", "{root}/new", "old/../new", "link"])
async def test_weights_are_replaced_from_the_allowed_directory(tmp_path: Path, spelling: str) -> None:
    root, core = tmp_path / "allowed", FakeCore()
    (root / "new").mkdir(parents=True)
    (root / "link").symlink_to(root / "new")
    async with running_server(tmp_path, core, weight_update_path=root) as server:
        answer = await server.post("/update_weights", {"path": spelling.format(root=root)})
        assert answer.status_code == 200
        assert answer.json() == {"message": "The weights of fake were replaced."}
        folder = UpdateWeights(str((root / "new").resolve()))
        assert commands(core) == [Pause(drain=True, is_temporary=True), folder, Resume()]
        assert not await is_paused(server)
        core.received.clear()
        for mode in ("keep", "abort"):
            await server.post("/update_weights", {"path": "new", "mode": mode, "model": "alias"})
        assert commands(core) == [folder, folder]


async def test_weights_are_replaced_in_sglangs_api(tmp_path: Path) -> None:
    core = FakeCore()
    (tmp_path / "new").mkdir()
    async with running_server(tmp_path, core, weight_update_path=tmp_path) as server:
        for fields in ({}, {"load_format": "auto", "flush_cache": True, "abort_all_requests": True}):
            answer = await server.post("/update_weights_from_disk", {"model_path": "new", **fields})
            assert answer.json() == {
                "success": True,
                "message": "The weights of fake were replaced.",
                "num_paused_requests": 0,
            }
        folder = UpdateWeights(str(tmp_path / "new"))
        assert commands(core) == [Pause(drain=True, is_temporary=True), folder, Resume(), folder]
        refused = await server.post("/update_weights_from_disk", {"model_path": "new", "flush_cache": False})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "flush_cache")
        refused = await server.post("/update_weights_from_disk", {"model_path": ".."})
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "model_path")


@pytest.mark.parametrize("path", ["..", "../secret", "/etc", "new/../../secret", "link", "/"])
async def test_other_directories_are_forbidden(tmp_path: Path, path: str) -> None:
    root, core = tmp_path / "allowed", FakeCore()
    for folder in (root, tmp_path / "secret"):
        folder.mkdir()
    (root / "link").symlink_to(tmp_path / "secret")
    async with running_server(tmp_path, core, weight_update_path=root) as server:
        answer = await server.post("/update_weights", {"path": path})
        assert answer.status_code == 403
        assert answer.json()["error"]["param"] == "path"
        assert not commands(core)


async def test_without_the_flag_no_directory_is_allowed(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post("/update_weights", {"path": str(tmp_path)})
        assert answer.status_code == 403
        assert "--weight-update-path" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "path"),
        ({"path": ""}, "path"),
        ({"path": 5}, "path"),
        ({"path": "a\0b"}, "path"),
        ({"path": "x" * 5000}, "path"),
        ({"path": "new", "mode": "slowly"}, "mode"),
        ({"path": "new", "model": 5}, "model"),
    ],
)
async def test_wrong_bodies_of_updates_are_refused(tmp_path: Path, body: Any, param: str) -> None:
    async with running_server(tmp_path, weight_update_path=tmp_path) as server:
        answer = await server.post("/update_weights", body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


async def test_weights_that_do_not_fit_are_refused_and_the_server_goes_on(tmp_path: Path) -> None:
    core = FakeCore(command_error=("new lacks weights", True))
    async with running_server(tmp_path, core, weight_update_path=tmp_path) as server:
        answer = await server.post("/update_weights", {"path": "new", "mode": "keep"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "The weights were not replaced: new lacks weights"
        core.command_error = None
        assert (await server.post(COMPLETIONS, SHORT)).status_code == 200


async def test_profiles_are_of_one_model(tmp_path: Path) -> None:
    core, other = FakeCore(), FakeCore()
    config = {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    async with running_server(tmp_path, core, other, profiler_config=config) as server:
        for path, expected in (("/start_profile", StartProfile()), ("/stop_profile", StopProfile())):
            answer = await server.post(path)
            assert (answer.status_code, answer.content) == (200, b"")
            assert commands(core)[-1] == expected
        assert not commands(other)
        await server.post("/start_profile?model=fake-1")
        assert commands(other) == [StartProfile()]
        core.command_error = ("already", False)
        assert (await server.post("/start_profile")).status_code == 409
        core.command_error = None


async def test_without_the_flag_there_are_no_profiles(tmp_path: Path) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        for path in ("/start_profile", "/stop_profile"):
            answer = await server.post(path)
            assert answer.status_code == 400
            assert "--profiler-config" in answer.json()["error"]["message"]
        assert not commands(core)


async def test_the_end_of_an_engine_ends_the_wait(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 5), die_at_step=1)
    core.hold.set()
    async with running_server(tmp_path, core) as server:
        running = asyncio.create_task(server.post(COMPLETIONS, SHORT))
        await until(lambda: core.active)
        pausing = asyncio.create_task(server.post("/pause?mode=wait"))
        await until(lambda: commands(core))
        core.hold.clear()
        assert (await pausing).status_code == 503
        assert (await running).status_code == 503
        assert not await is_paused(server)
