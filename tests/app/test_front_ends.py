"""`quire serve --api-server-count`: several processes that serve HTTP before one engine."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from quire.app.serve import check_settings
from quire.config.command import ConfigError
from quire.config.commands import Render, Serve
from tests.support.patience import PATIENCE
from tests.support.process import (
    ServerProcess,
    assert_all_have_ended,
    cores_and_ranks,
    ended,
    eventually,
    failing,
    serving,
    tiny_model,
)

BODY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
ENDLESS = {"max_tokens": 16_000, "ignore_eos": True, "stream": True}
ASLEEP = 503

pytestmark = pytest.mark.skipif("sys.platform != 'linux'")


def model_in(folder: Path) -> Path:
    """A small model with a context in which requests run for long."""
    return tiny_model(folder / "tiny", max_position_embeddings=16_384)


@contextmanager
def several(folder: Path, *flags: str, count: int = 2, env: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    """A server with several front ends, each of which has answered."""
    with serving(str(folder), "--api-server-count", str(count), *flags, env=env) as server:
        eventually(lambda: set(answered(server)) == set(range(count)) and min(answered(server).values()) > 0)
        yield server


def answered(server: ServerProcess) -> dict[int, int]:
    """How many requests each front end has answered, after one more."""
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:  # a new connection
        assert client.get("/v1/models").status_code == httpx.codes.OK
        page = client.get("/metrics").text
    counts = re.findall(r'^quire:api_server_requests_total\{api_server="(\d+)"\} (\S+)$', page, re.MULTILINE)
    return {int(number): int(float(count)) for number, count in counts}


def front_ends(server: ServerProcess) -> list[psutil.Process]:
    """The processes of front ends, in their order."""
    named = []
    for child in psutil.Process(server.process.pid).children():
        with suppress(psutil.NoSuchProcess):  # it has ended since
            named.append((child.name(), child.pid, child))
    return [child for name, _, child in sorted(named, key=lambda entry: entry[:2]) if name.startswith("quire-front")]


@asynccontextmanager
async def clients(server: ServerProcess, count: int) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Clients with a connection each, which the system divides among the front ends."""
    made = [httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) for _ in range(count)]
    try:
        yield made
    finally:
        await asyncio.gather(*(client.aclose() for client in made))


async def posted(server: ServerProcess, path: str, body: dict[str, Any], count: int = 8) -> list[httpx.Response]:
    """The answers to equal requests on as many connections, one after the other."""
    async with clients(server, count) as made:
        return [await client.post(path, json=body) for client in made]


async def got(server: ServerProcess, path: str, count: int = 8) -> list[httpx.Response]:
    async with clients(server, count) as made:
        return [await client.get(path) for client in made]


async def end_of_stream(client: httpx.AsyncClient, begun: list[int], body: dict[str, Any]) -> str:
    """How a stream of a completion ends: its finish reason, the type of its error, or `cut`."""
    end = "cut"
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if not begun or end == "cut":
                        begun.append(answer.status_code)
                    end = event["error"]["type"] if "error" in event else event["choices"][0]["finish_reason"] or "runs"
    except httpx.TransportError:
        return "cut"
    return end


async def begun_streams(made: list[httpx.AsyncClient], body: dict[str, Any]) -> list[asyncio.Task[str]]:
    """Streams of completions that have all begun."""
    begun: list[int] = []
    tasks = [asyncio.create_task(end_of_stream(client, begun, body)) for client in made]
    async with asyncio.timeout(PATIENCE):
        while len(begun) < len(tasks):
            assert not any(task.done() for task in tasks)
            await asyncio.sleep(0.005)
    return tasks


async def sooner_or_later(condition: Callable[[], bool]) -> None:
    """Wait for what another process brings about, while clients go on."""
    async with asyncio.timeout(PATIENCE):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.05)


async def test_front_ends_divide_requests_and_one_that_is_killed_ends_only_its_own(tmp_path: Path) -> None:
    folder = model_in(tmp_path)
    with several(folder, "--max-client-share", "1", "--max-num-seqs", "16") as server:
        assert "before 2 that serve HTTP" in server.log
        before = front_ends(server)
        assert len(before) == 2
        texts = {
            answer.json()["choices"][0]["text"]
            for answer in await posted(server, "/v1/completions", {**BODY, "prompt": "a b"})
        }
        assert len(texts) == 1
        await sooner_or_later(lambda: server.metric("request_success_total") == 8)
        assert server.metric("generation_tokens_total") == 32
        assert server.metric("iteration_tokens_total_sum") >= 32, "steps are counted once"
        async with clients(server, 12) as made:
            tasks = await begun_streams(made, {**ENDLESS, "prompt": "a b c"})
            await sooner_or_later(lambda: server.metric("num_requests_running") == 12)
            assert sum(response.json()["server_load"] for response in await got(server, "/load", 1)) == 12
            before[1].kill()
            await sooner_or_later(lambda: server.metric("num_requests_running") < 12)
            ends = Counter(task.result() for task in tasks if task.done())
            left = [task for task in tasks if not task.done()]
            assert set(ends) == {"cut"}
            assert 0 < len(left) < 12
            await sooner_or_later(lambda: server.metric("num_requests_running") == len(left))
            await sooner_or_later(lambda: len(front_ends(server)) == 2)
            for task in left:
                task.cancel()
        await sooner_or_later(lambda: server.metric("kv_cache_blocks_used") == 0)
        after = front_ends(server)
        assert after[0] == before[0]
        assert after[1] != before[1]
        assert server.metric("request_success_total") >= 8, "what it has counted is kept"
        await sooner_or_later(lambda: all(count > 12 for count in answered(server).values()))
        async with clients(server, 8) as made:
            tasks = await begun_streams(made, {**BODY, "max_tokens": 400, "stream": True, "prompt": "a"})
            server.process.send_signal(signal.SIGTERM)
            assert Counter(await asyncio.gather(*tasks)) == {"length": 8}
        assert server.process.wait(PATIENCE) == 0
        assert "front end 1 ended with status -9; it is started again" in server.log
        assert "Traceback" not in server.log
        assert_all_have_ended(after)


async def test_limits_hold_for_all_front_ends_together(tmp_path: Path) -> None:
    folder = model_in(tmp_path)
    flags = ("--max-num-seqs", "3", "--max-num-queued-seqs", "1", "--max-num-batched-tokens", "64")
    with several(folder, *flags, "--max-client-share", "1") as server:
        async with clients(server, 4) as made:
            tasks = await begun_streams(made[:3], {**ENDLESS, "prompt": "a"})
            waiting = asyncio.create_task(made[3].post("/v1/completions", json={**BODY, "prompt": "b"}))
            await sooner_or_later(lambda: server.metric("num_requests_waiting") == 1)
            refused = await posted(server, "/v1/completions", {**BODY, "prompt": "c"})
            assert {answer.status_code for answer in refused} == {503}
            assert all("4 of at most 4 sequences" in answer.text for answer in refused)
            for task in tasks:
                task.cancel()
            assert (await waiting).status_code == httpx.codes.OK
        await sooner_or_later(lambda: server.metric("num_requests_running") == 0)
        accepted = await posted(server, "/v1/completions", {**BODY, "prompt": "c"})
        assert {answer.status_code for answer in accepted} == {200}


@pytest.mark.slow
async def test_the_limits_of_keys_and_the_slots_of_a_process_that_dies(tmp_path: Path) -> None:
    folder = model_in(tmp_path)
    key = {"authorization": "Bearer secret"}
    flags = ("--api-key", "secret", "--max-concurrent-requests", "2")
    with serving(str(folder), "--api-server-count", "2", *flags) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, headers=key) as client:

            async def status() -> int:
                async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, headers=key) as another:
                    return (await another.post("/v1/completions", json={**BODY, "prompt": "c"})).status_code

            (first,) = await begun_streams([client], {**ENDLESS, "prompt": "a"})
            async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, headers=key) as other:
                (second,) = await begun_streams([other], {**ENDLESS, "prompt": "a"})
                assert {await status() for _ in range(10)} == {429}
                for front_end in front_ends(server):
                    front_end.kill()
                assert {await first, await second} == {"cut"}
        async with asyncio.timeout(PATIENCE):
            while await status() != httpx.codes.OK:
                await asyncio.sleep(0.02)
        assert {await status() for _ in range(10)} == {200}


async def test_what_an_operator_does_to_the_engine_is_known_to_all(tmp_path: Path) -> None:
    folder = model_in(tmp_path)
    flags = ("--enable-sleep-mode", "--max-client-share", "1")
    with several(folder, *flags, env={"XDG_STATE_HOME": str(tmp_path)}) as server:

        async def answers(path: str) -> set[str]:
            return {response.text for response in await got(server, path)}

        async with clients(server, 8) as made:
            tasks = await begun_streams(made, {**ENDLESS, "prompt": "a"})
            (slept,) = await posted(server, "/sleep?level=2", {}, 1)
            assert slept.status_code == httpx.codes.OK, slept.text
            assert Counter(await asyncio.gather(*tasks)).keys() == {"ServiceUnavailableError"}
        assert await answers("/is_sleeping") == {'{"is_sleeping":true}'}
        assert {answer.status_code for answer in await got(server, "/ready")} == {503}
        refused = await posted(server, "/v1/completions", {**BODY, "prompt": "c"})
        assert {answer.status_code for answer in refused} == {ASLEEP}
        assert (
            'quire:engine_sleep_state{engine="0",model_name="tiny",sleep_state="discard_all"} 1.0'
            in (await got(server, "/metrics", 1))[0].text
        )
        (woken,) = await posted(server, "/wake_up", {}, 1)
        assert woken.status_code == httpx.codes.OK, woken.text
        assert await answers("/is_sleeping") == {'{"is_sleeping":false}'}
        async with clients(server, 8) as made:
            tasks = await begun_streams(made, {**ENDLESS, "prompt": "a"})
            (paused,) = await posted(server, "/pause", {}, 1)
            assert paused.status_code == httpx.codes.OK, paused.text
            assert Counter(await asyncio.gather(*tasks)).keys() == {"ServiceUnavailableError"}
        assert await answers("/is_paused") == {'{"is_paused":true}'}
        (resumed,) = await posted(server, "/resume", {}, 1)
        assert resumed.status_code == httpx.codes.OK
        assert await answers("/is_paused") == {'{"is_paused":false}'}
        done = await posted(server, "/v1/completions", {**BODY, "prompt": "c"})
        assert {answer.status_code for answer in done} == {200}
        await check_stored_responses(server)


async def check_stored_responses(server: ServerProcess) -> None:
    """Responses are found by all; what others would not find is refused by name."""
    body = {"input": "hi", "max_output_tokens": 4}
    (answer,) = await posted(server, "/v1/responses", body, 1)
    assert answer.status_code == httpx.codes.OK, answer.text
    stored = await got(server, f"/v1/responses/{answer.json()['id']}")
    assert {response.json()["id"] for response in stored} == {answer.json()["id"]}
    for response in await posted(server, "/v1/responses", {**body, "background": True}, 4):
        assert response.status_code == httpx.codes.BAD_REQUEST
        assert "--api-server-count" in response.json()["error"]["message"]
    for response in await got(server, "/v1/files", 4):
        assert response.status_code == httpx.codes.BAD_REQUEST
        assert "--api-server-count" in response.json()["error"]["message"]


@pytest.mark.slow
async def test_an_engine_that_dies_is_restarted_for_all(tmp_path: Path) -> None:
    folder = model_in(tmp_path)
    with several(folder, "--on-engine-death", "restart", "--max-client-share", "1") as server:
        (engine,) = [
            child for child in psutil.Process(server.process.pid).children() if child.name().startswith("quire-engine")
        ]
        async with clients(server, 8) as made:
            tasks = await begun_streams(made, {**ENDLESS, "prompt": "a"})
            engine.kill()
            assert Counter(await asyncio.gather(*tasks)).keys() == {"ServiceUnavailableError"}

        async def statuses() -> set[int]:
            return {answer.status_code for answer in await posted(server, "/v1/completions", {**BODY, "prompt": "c"})}

        async with asyncio.timeout(PATIENCE):
            while await statuses() != {200}:
                await asyncio.sleep(0.05)
        assert server.metric("engine_restarts_total") == 1


@pytest.mark.slow
async def test_an_engine_that_dies_ends_the_server(tmp_path: Path) -> None:
    folder = model_in(tmp_path)
    with several(folder) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        (engine,) = [child for child in children if child.name().startswith("quire-engine")]
        engine.kill()
        assert server.process.wait(PATIENCE) == 1
        assert "the server stops: its process ended with exit code -9" in server.log.replace(
            "The engine has stopped: ", ""
        )
        assert_all_have_ended(children)


@pytest.mark.slow
async def test_all_end_with_their_parent_and_leave_nothing_behind(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = model_in(tmp_path)
    files = tmp_path_factory.mktemp("server")  # a short path, as sockets need it
    with several(folder, env={"TMPDIR": str(files)}) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert list(files.glob("quire-*"))
        server.process.kill()
        assert_all_have_ended(children)
        await sooner_or_later(lambda: not list(files.glob("quire-*")))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("m --uds quire.sock", "--uds does not work with --api-server-count 2"),
        ("m --nnodes 2 --tensor-parallel-size 2", "--nnodes does not work with --api-server-count 2"),
        ("m --no-engine-process", "--no-engine-process does not work with --api-server-count 2"),
        ("m --response-store sqlite://", "--response-store sqlite:// does not work with --api-server-count 2"),
        ("m --otlp-metrics-endpoint http://127.0.0.1:9", "metrics are not exported over OTLP with"),
        ("m --max-total-body-size 40MiB", "--max-total-body-size is 41943040 bytes, of which each of"),
        ("m n", "--api-server-count works with one MODEL; 1 is accepted with 2"),
        ("", "--api-server-count works with one MODEL; 1 is accepted with 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(words: str, complaint: str) -> None:
    settings = Serve.parse(["--api-server-count", "2", *words.split()])
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        check_settings(settings)


def test_a_render_server_has_one_process() -> None:
    with pytest.raises(ConfigError, match="--api-server-count 2 needs an engine"):
        check_settings(Render.parse(["m", "--api-server-count", "2"]))


@pytest.mark.slow
def test_a_port_that_is_in_use_and_a_model_that_cannot_be_loaded_are_refused(tmp_path: Path) -> None:
    folder = model_in(tmp_path)
    with serving(str(folder)) as server:
        port = server.url.rpartition(":")[2]
        status, _, errors = ended("serve", str(folder), "--api-server-count", "2", "--port", port)
        assert status == 1
        assert "Address already in use" in errors
    next(folder.glob("*.safetensors")).write_bytes(b"nothing")
    log = failing(str(folder), "--api-server-count", "2", "--port", "0")
    assert log.count("cannot serve: ") == 1
    assert "Traceback" not in log


REPLICAS = ("--data-parallel-size", "2", "--max-client-share", "1", "--max-num-seqs", "64")
PROMPTS = ["a b c d e f g h " * 4 + str(number) for number in range(4)]


async def replicas_of(server: ServerProcess) -> set[str]:
    """The states of the replicas, in their order, as front ends see them."""
    lists = [answer.json()["data"] for answer in await got(server, "/replicas", 6)]
    return {" ".join(replica["state"] for replica in replicas) for replicas in lists}


def sum_of_requests(server: ServerProcess) -> int:
    with server.http as client:
        return sum(replica["requests"] for replica in client.get("/replicas").json()["data"])


async def until_replicas_are(server: ServerProcess, states: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while await replicas_of(server) != {states}:
            await asyncio.sleep(0.02)


async def test_front_ends_before_replicas_answer_as_one_server_and_share_what_is_known(tmp_path: Path) -> None:
    folder = model_in(tmp_path)
    body = {**BODY, "max_tokens": 12}
    with serving(str(folder)) as server, server.http as client:
        alone = [client.post("/v1/completions", json={**body, "prompt": prompt}).json() for prompt in PROMPTS]
    with several(folder, *REPLICAS) as server:
        assert "2 replicas, each in a process, before 2 that serve HTTP" in server.log
        for prompt, answer in zip(PROMPTS, alone, strict=True):
            answers = [
                response.json() for response in await posted(server, "/v1/completions", {**body, "prompt": prompt}, 4)
            ]
            assert {each["choices"][0]["text"] for each in answers} == {answer["choices"][0]["text"]}
        assert server.metric("request_success_total") == 16
        assert server.metric("prefix_cache_hits_total") >= 12 * 64, (
            "whichever front end asks, it is asked where they are"
        )
        before = front_ends(server)
        async with clients(server, 16) as made:
            tasks = await begun_streams(made, {**ENDLESS, "prompt": "a b c"})
            (load,) = await got(server, "/replicas", 1)
            requests = [replica["requests"] for replica in load.json()["data"]]
            assert sum(requests) == 16
            assert min(requests) >= 4  # front ends that choose at the same moment do not know of each other's choice
            before[1].kill()
            await sooner_or_later(lambda: len(front_ends(server)) == 2 and before[1] not in front_ends(server))
            left = [task for task in tasks if not task.done()]
            assert 0 < len(left) < 16
            await sooner_or_later(lambda: server.metric("num_requests_running") == len(left))
            cores_and_ranks(server)[1].kill()
            await sooner_or_later(lambda: any(task.done() for task in left))
            await until_replicas_are(server, "ready ready")
            still = [task for task in left if not task.done()]
            assert {task.result() for task in left if task.done()} == {"ServiceUnavailableError"}
            assert still, "those of the other replica"
            for task in still:
                task.cancel()
        assert server.metric("engine_restarts_total") == 1
        await sooner_or_later(lambda: server.metric("num_requests_running") == 0)
        (load,) = await got(server, "/replicas", 1)
        assert [(replica["requests"], replica["tokens"]) for replica in load.json()["data"]] == [(0, 0), (0, 0)]
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        assert_all_have_ended(children)
        assert "Traceback" not in server.log


async def test_a_replica_that_is_started_again_is_paused_as_the_others_are(tmp_path: Path) -> None:
    with several(model_in(tmp_path), *REPLICAS) as server:
        (paused,) = await posted(server, "/pause?mode=keep", {}, 1)
        assert paused.status_code == httpx.codes.OK
        assert {answer.text for answer in await got(server, "/is_paused")} == {'{"is_paused":true}'}
        cores_and_ranks(server)[0].kill()
        await sooner_or_later(lambda: server.metric("engine_restarts_total") == 1)
        await until_replicas_are(server, "ready ready")
        async with clients(server, 8) as made:
            bodies = [{**BODY, "prompt": "b"} for _ in made]
            waiting = [
                asyncio.create_task(client.post("/v1/completions", json=body))
                for client, body in zip(made, bodies, strict=True)
            ]
            await sooner_or_later(lambda: sum_of_requests(server) == 8)
            (resumed,) = await posted(server, "/resume", {}, 1)
            assert resumed.status_code == httpx.codes.OK
            assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
        assert "Traceback" not in server.log


@pytest.mark.slow
async def test_the_number_of_replicas_is_changed_through_any_front_end(tmp_path: Path) -> None:
    with several(model_in(tmp_path), *REPLICAS) as server:
        async with clients(server, 6) as made:
            for size in (3, 2):
                body = {**BODY, "max_tokens": 4000, "stream": True, "prompt": "a"}
                tasks = await begun_streams(made, body)
                answers = await asyncio.gather(
                    *(posted(server, "/scale_elastic_ep", {"new_data_parallel_size": size}, 1) for _ in range(2))
                )
                assert httpx.codes.OK in {answer.status_code for (answer,) in answers}
                await until_replicas_are(server, " ".join(["ready"] * size))
                assert Counter(await asyncio.gather(*tasks)) == {"length": 6}
        await sooner_or_later(lambda: len(cores_and_ranks(server)) == 2)
        async with clients(server, 6) as made:
            tasks = await begun_streams(made, {**ENDLESS, "prompt": "a"})
            body = {"new_data_parallel_size": 1, "drain_timeout": 0.05}
            (late,) = await posted(server, "/scale_elastic_ep", body, 1)
            assert late.status_code == httpx.codes.REQUEST_TIMEOUT, late.text
            assert "there are 2 replicas as before" in late.text
            await until_replicas_are(server, "ready ready")
            assert not any(task.done() for task in tasks)
            for task in tasks:
                task.cancel()
        assert "Traceback" not in server.log
