"""`quire serve --data-parallel-size`: replicas in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from quire.app.serve import _check_replicas
from quire.config.command import ConfigError
from quire.config.commands import Serve
from tests.support.patience import PATIENCE
from tests.support.process import ServerProcess, cores_and_ranks, eventually, serving, tiny_model

BODY = {"max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True}


async def last_event(
    client: httpx.AsyncClient, index: int, begun: list[int], **fields: Any
) -> tuple[dict[str, Any], float]:
    """The last event of a stream before its end, and when it came."""
    event: dict[str, Any] = {}
    came = 0.0
    body = {**BODY, "prompt": f"{index} is the number", **fields}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                if not event:
                    begun.append(index)
                event, came = json.loads(line[6:]), time.monotonic()
    return event, came


async def streams_while_one_is_killed(server: ServerProcess, count: int) -> tuple[Counter[str], float]:
    """How many streams end how while a replica is killed, and how long the last error took."""
    begun: list[int] = []
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
        tasks = [asyncio.create_task(last_event(client, index, begun, max_tokens=900)) for index in range(count)]
        while len(begun) < count:
            await asyncio.sleep(0.001)
        killed = time.monotonic()
        cores_and_ranks(server)[-1].kill()
        ends = await asyncio.gather(*tasks)
    kinds = Counter("error" if "error" in event else event["choices"][0]["finish_reason"] for event, _ in ends)
    messages = {event["error"]["message"] for event, _ in ends if "error" in event}
    assert all("exit code -9" in message for message in messages)
    return kinds, max((came for event, came in ends if "error" in event), default=killed) - killed


def states(client: httpx.Client) -> list[str]:
    return [replica["state"] for replica in client.get("/replicas").json()["data"]]


def ended(client: httpx.Client, engine: int) -> Counter[str]:
    """Requests of an engine that have ended, by their finish reason."""
    page = client.get("/metrics").text
    pattern = rf'^quire:request_success_total\{{engine="{engine}",.*finished_reason="(\w+)".*\}} (\S+)$'
    return +Counter({reason: int(float(count)) for reason, count in re.findall(pattern, page, re.MULTILINE)})


def test_replicas_divide_requests_and_one_that_is_killed_ends_only_its_own(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tiny_model(tmp_path / "tiny", max_position_embeddings=1024)
    files = tmp_path_factory.mktemp("server")  # a short path, as sockets need it
    flags = ["--data-parallel-size", "2", "--max-num-seqs", "64", "--max-client-share", "1"]
    with serving(str(folder), *flags, env={"TMPDIR": str(files)}) as server, server.http as client:
        assert "2 replicas, each in a process" in server.log
        assert states(client) == ["ready", "ready"]
        cores = len(os.sched_getaffinity(0))
        if cores > 1:
            assert [len(core.cpu_affinity() or []) for core in cores_and_ranks(server)] == [
                cores // 2,
                cores - cores // 2,
            ]
        kinds, seconds = asyncio.run(streams_while_one_is_killed(server, 64))
        assert kinds.keys() == {"error", "length"}
        assert kinds.total() == 64
        assert seconds < PATIENCE
        assert client.get("/health").status_code == 200
        eventually(lambda: states(client) == ["ready", "ready"], PATIENCE)
        assert server.metric("engine_restarts_total") == 1
        for rank in ("0", "1"):
            body = {"prompt": "x", "max_tokens": 2}
            answer = client.post("/v1/completions", json=body, headers={"x-data-parallel-rank": rank})
            assert answer.status_code == 200
        refused = client.post("/v1/completions", json={"prompt": "x"}, headers={"x-data-parallel-rank": "2"})
        assert refused.status_code == 400
        assert "must be a number from 0 to 1" in refused.json()["error"]["message"]
        kinds["length"] += 2  # the last two
        survivor, killed = ended(client, 0), ended(client, 1)
        assert survivor.keys() == {"length"}
        assert survivor + killed == kinds  # some of the killed one's may have ended before
        assert min(survivor.total(), killed.total()) > 16  # they are divided by work, not by counts
        assert server.metric("num_requests_running") == 0
        assert all(
            not replica["requests"] and not replica["tokens"] for replica in client.get("/replicas").json()["data"]
        )
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive
        eventually(lambda: not list(files.glob("quire-*")))
        assert "Traceback" not in server.log


def test_the_number_of_replicas_changes_without_the_loss_of_a_stream(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")

    async def streams_meanwhile(server: ServerProcess) -> None:
        begun: list[int] = []
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
            for size in (3, 1):
                tasks = [asyncio.create_task(last_event(client, index, begun)) for index in range(8)]
                answer = await client.post("/scale_elastic_ep", json={"new_data_parallel_size": size})
                assert answer.json() == {"message": f"Scaled to {size} data parallel engines"}
                ends = await asyncio.gather(*tasks)
                assert {event["choices"][0]["finish_reason"] for event, _ in ends} == {"length"}
                replicas = (await client.get("/replicas")).json()["data"]
                assert [(replica["engine"], replica["state"]) for replica in replicas] == [
                    (rank, "ready") for rank in range(size)
                ]

    with serving(str(folder), "--enable-elastic-ep") as server, server.http as client:
        asyncio.run(streams_meanwhile(server))
        eventually(lambda: len(cores_and_ranks(server)) == 1)
        assert client.post("/is_scaling_elastic_ep").json() == {"is_scaling_elastic_ep": False}
        wrong = client.post("/scale_elastic_ep", json={"new_data_parallel_size": 0})
        assert wrong.status_code == 400
        cores_and_ranks(server)[0].kill()
        assert server.process.wait(PATIENCE) == 1  # the last one: --on-engine-death exit
        assert "Traceback" not in server.log


def test_requests_that_do_not_end_in_time_keep_their_replica(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    with serving(str(folder), "--data-parallel-size", "2") as server, server.http as client, server.http as other:
        body = {**BODY, "prompt": "x"}
        client.post("/pause?mode=keep")
        with other.stream("POST", "/v1/completions", json=body, headers={"x-data-parallel-rank": "1"}) as answer:
            late = client.post("/scale_elastic_ep", json={"new_data_parallel_size": 1, "drain_timeout": 0.05})
            assert late.status_code == 408
            assert "there are 2 replicas as before" in late.json()["error"]["message"]
            assert states(client) == ["ready", "ready"]
            client.post("/resume")
            assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"


def test_replicas_of_a_part_have_the_ranks_of_the_part(tmp_path: Path) -> None:
    flags = ["--data-parallel-size", "4", "--data-parallel-size-local", "2"]
    flags += ["--data-parallel-hybrid-lb", "--data-parallel-start-rank", "2"]
    with serving(str(tiny_model(tmp_path / "tiny")), *flags) as server, server.http as client:
        assert [replica["engine"] for replica in client.get("/replicas").json()["data"]] == [2, 3]
        body = {"prompt": "x", "max_tokens": 1}
        for rank, status in (("2", 200), ("3", 200), ("3", 200), ("0", 400), ("4", 400)):
            answer = client.post("/v1/completions", json=body, headers={"x-data-parallel-rank": rank})
            assert answer.status_code == status
        assert "must be a number from 2 to 3" in answer.json()["error"]["message"]
        assert [ended(client, engine).total() for engine in (2, 3)] == [1, 2]
        refused = client.post("/scale_elastic_ep", json={"new_data_parallel_size": 3})
        assert refused.status_code == 409
        assert "other servers have the next ranks" in refused.json()["error"]["message"]
        cores_and_ranks(server)[1].kill()
        eventually(
            lambda: server.metric("engine_restarts_total") == 1 and states(client) == ["ready", "ready"], PATIENCE
        )
        assert [replica["engine"] for replica in client.get("/replicas").json()["data"]] == [2, 3]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--data-parallel-size 2", "--data-parallel-size works with one MODEL"),
        ("a b --enable-elastic-ep", "--enable-elastic-ep works with one MODEL"),
        ("a -dp 2 -dpn 2", "--data-parallel-rank is 2, but must be less than --data-parallel-size 2"),
        ("a -dp 2 -dpl 1", "--data-parallel-size-local is 1, but must be 2"),
        ("a -dp 2 -dpn 1 -dpl 2", "--data-parallel-size-local is 2, but must be 1"),
        ("a -dp 2 -dpe", "--data-parallel-external-lb needs --data-parallel-rank"),
        ("a -dp 2 -dpn 1 --enable-elastic-ep", "--enable-elastic-ep does not work with --data-parallel-rank"),
        ("a -dp 4 -dpr 2", "--data-parallel-start-rank needs --data-parallel-hybrid-lb"),
        ("a -dp 4 -dph -dpr 2", "--data-parallel-hybrid-lb needs --data-parallel-size-local"),
        ("a -dp 4 -dph -dpl 3 -dpr 2", "ranks up to 4, but they must be less than --data-parallel-size 4"),
        ("a -dp 4 -dph -dpl 2 -dpn 2", "--data-parallel-hybrid-lb does not work with --data-parallel-rank"),
        ("a -dp 4 -dph -dpl 2 --enable-elastic-ep", "--enable-elastic-ep does not work with --data-parallel-hybrid-lb"),
        ("a b -dp 4 -dph -dpl 2", "--data-parallel-size works with one MODEL"),
    ],
)
def test_settings_of_replicas_that_contradict_each_other_are_refused(line: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        _check_replicas(Serve.parse(line.split()))


@pytest.mark.parametrize(
    "line",
    [
        "a b",
        "a -dp 2 -dpl 2",
        "a -dp 4 -dpn 3 -dpe -dpl 1",
        "a b -dp 4 -dpn 0",
        "a -dp 4 -dph -dpl 2 -dpr 2",
        "a b -dp 4 -dph -dpl 1",
    ],
)
def test_settings_of_replicas_that_agree_are_accepted(line: str) -> None:
    _check_replicas(Serve.parse(line.split()))
