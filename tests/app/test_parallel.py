"""`quire serve` with ranks in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.process import (
    ServerProcess,
    assert_all_have_ended,
    command_of,
    cores_and_ranks,
    eventually,
    serving,
    tiny_model,
)

CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 12}


def processes_of(server: ServerProcess) -> list[psutil.Process]:
    """All processes below the server's."""
    return psutil.Process(server.process.pid).children(recursive=True)


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for the temporary files of a server alone; its path is short, as sockets need it."""
    return tmp_path_factory.mktemp("server")


def assert_nothing_is_left(processes: list[psutil.Process], temporary: Path) -> None:
    assert_all_have_ended(processes)
    eventually(lambda: not list(temporary.glob("quire-*")))


def test_two_ranks_answer_a_chat_as_one_does(temporary: Path) -> None:
    """The rank is started as users' servers start it."""
    answers = []
    env = {"TMPDIR": str(temporary)}
    for flags in ([], ["--tensor-parallel-size", "2"]):
        with (
            serving("quire-nano", "--dtype", "float32", *flags, env=env, new_interpreters=bool(flags)) as server,
            server.http as client,
        ):
            processes = processes_of(server)
            answers.append(client.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]["content"])
            listening = [c for process in processes for c in process.net_connections() if c.status == "LISTEN"]
            assert {connection.laddr.ip for connection in listening} <= {"127.0.0.1"}
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0
        assert_nothing_is_left(processes, temporary)
    assert answers[0] == answers[1]
    assert "Traceback" not in server.log


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["-tp", "2"], marks=pytest.mark.slow),
        ["-pp", "2", "--engine-process"],
        pytest.param(["-pp", "3"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_rank_that_is_killed_ends_the_server(flags: list[str], tmp_path: Path, temporary: Path) -> None:
    """A stream that runs is told so; afterwards no process, socket or folder is left."""
    folder = tiny_model(tmp_path / "tiny")
    body = {"prompt": "abc", "max_tokens": 240, "temperature": 0, "ignore_eos": True, "stream": True}
    with serving(str(folder), *flags, env={"TMPDIR": str(temporary)}) as server, server.http as client:
        processes = processes_of(server)
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            cores_and_ranks(server)[-1].kill()
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        ended = f"rank {int(flags[1]) - 1} of {flags[1]} has stopped"
        assert ended in json.loads(events[-2])["error"]["message"]
        assert server.process.wait(60) == 1
        eventually(lambda: f"the server stops: The engine has stopped: {ended}" in server.log)
        assert "Traceback" not in server.log
    assert_nothing_is_left(processes, temporary)


def test_a_rank_that_is_killed_while_idle_is_noticed_and_the_engine_restarts(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    with serving(str(folder), "-tp", "2", "--on-engine-death", "restart") as server, server.http as client:
        before = client.post("/v1/completions", json={"prompt": "abc", "temperature": 0}).json()["choices"][0]["text"]
        cores_and_ranks(server)[-1].kill()
        eventually(lambda: server.metric("engine_restarts_total") == 1, 60)
        eventually(lambda: client.get("/ready").status_code == 200, 60)
        after = client.post("/v1/completions", json={"prompt": "abc", "temperature": 0}).json()["choices"][0]["text"]
        assert after == before


@pytest.mark.parametrize(
    ("sent", "to_all", "status", "flag"),
    [
        (signal.SIGTERM, False, 0, "--no-engine-process"),
        (signal.SIGKILL, False, -9, "--engine-process"),
        pytest.param(signal.SIGTERM, False, 0, "--engine-process", marks=pytest.mark.slow),  # each is above
        pytest.param(signal.SIGINT, True, 130, "--no-engine-process", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_is_ended_while_it_loads_leaves_nothing(
    sent: signal.Signals, to_all: bool, status: int, flag: str, tmp_path: Path, temporary: Path
) -> None:
    """A terminal sends Ctrl-C to the ranks as well, which have just been started."""
    folder = tiny_model(tmp_path / "tiny")
    command = [sys.executable, "-m", "quire", "serve", str(folder), "--port", "0", "-tp", "2", flag]
    env = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "2 ranks" in line)  # the workers are started next
        eventually(
            lambda: any("spawn_main" in command_of(p) for p in psutil.Process(process.pid).children(recursive=True))
        )
        processes = psutil.Process(process.pid).children(recursive=True)
        if to_all:
            os.killpg(process.pid, sent)
        else:
            process.send_signal(sent)
        assert process.wait(60) == status
        errors = process.stderr.read()
    assert "Traceback" not in errors
    assert_nothing_is_left(processes, temporary)
