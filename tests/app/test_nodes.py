"""`quire serve` on two nodes, each of which has a loopback address, or a network namespace of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.patience import PATIENCE
from tests.support.process import (
    ServerProcess,
    assert_all_have_ended,
    cores_and_ranks,
    eventually,
    free_port,
    serving,
    starting,
    tiny_model,
    wait_until_it_listens,
)

PROMPT = {"prompt": "abc", "max_tokens": 12, "temperature": 0}
LONG = {"prompt": "abc", "max_tokens": 240, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def flags_of(port: int, *flags: str) -> list[str]:
    common = ["--dtype", "float32", "-tp", "2", "--nnodes", "2", "--master-addr", "127.0.0.1"]
    return [*common, "--master-port", str(port), *flags]


@contextmanager
def two_nodes(folder: Path, *flags: str, second: tuple[str, ...] = ()) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Both nodes, which have been started. `second`: further flags of node 1."""
    common = flags_of(free_port(), *flags)
    with (
        starting(str(folder), *common) as server,
        starting(str(folder), *common, "--node-rank", "1", "--headless", "--node-addr", "127.0.0.2", *second) as node,
    ):
        yield server, node


def test_two_nodes_answer_as_one_and_end_in_order(folder: Path) -> None:
    """Node 1 gets its signal first, as an orchestrator may do it, and waits for the server to finish."""
    with serving(str(folder), "--dtype", "float32") as server, server.http as client:
        expected = client.post("/v1/completions", json=PROMPT).json()["choices"]
    with two_nodes(folder) as (server, node):
        wait_until_it_listens(server)
        with server.http as client:
            processes = [*psutil.Process(server.process.pid).children(), *psutil.Process(node.process.pid).children()]
            assert client.post("/v1/completions", json=PROMPT).json()["choices"] == expected
            for started, address in ((server, "127.0.0.1"), (node, "127.0.0.2")):
                family = psutil.Process(started.process.pid)
                listening = [
                    connection.laddr.ip
                    for process in (family, *family.children(recursive=True))
                    for connection in process.net_connections("tcp")
                    if connection.status == psutil.CONN_LISTEN
                ]
                assert set(listening) == {address}
            node.process.send_signal(signal.SIGTERM)
            eventually(lambda: "this node ends with node 0" in node.log)
            assert client.post("/v1/completions", json=PROMPT).json()["choices"] == expected
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert node.process.wait(60) == 0
        assert "2 ranks on 2 nodes" in server.log
        assert_all_have_ended(processes)


def test_a_rank_of_node_1_that_is_killed_ends_both(folder: Path) -> None:
    with two_nodes(folder) as (server, node):
        wait_until_it_listens(server)
        with server.http as client, client.stream("POST", "/v1/completions", json=LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
            cores_and_ranks(node)[-1].kill()
            events = [line.removeprefix("data: ") for line in lines if line]
        ended = "rank 1 of 2 on node 1 (127.0.0.2) has stopped: its process ended with exit code -9"
        assert ended in json.loads(events[-2])["error"]["message"]
        assert server.process.wait(60) == 1
        assert node.process.wait(60) == 1
        eventually(lambda: f"the server stops: The engine has stopped: {ended}" in server.log)
        eventually(lambda: "node 1 ends: rank 1 of this node has stopped" in node.log)
        assert "Traceback" not in server.log + node.log


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_node_that_is_killed_ends_the_other_one(killed: int, folder: Path) -> None:
    with two_nodes(folder) as nodes:
        wait_until_it_listens(nodes[0])
        other = nodes[1 - killed]
        processes = psutil.Process(nodes[killed].process.pid).children(recursive=True)
        nodes[killed].process.kill()
        assert other.process.wait(60) == 1
        reason = "node 1 ends: node 0 at 127.0.0.1" if killed == 0 else "rank 1 of 2 on node 1 (127.0.0.2) has stopped"
        eventually(lambda: reason in other.log)
        assert "Traceback" not in other.log
        assert_all_have_ended(processes)


def test_nodes_with_different_settings_both_say_which(folder: Path) -> None:
    with two_nodes(folder, second=("--dtype", "bfloat16", "--block-size", "32")) as (server, node):
        difference = (
            "--dtype is bfloat16 on node 1 and float32 on node 0; --block-size is 32 on node 1 and 16 on node 0"
        )
        for process, place in (
            (server, "node 1 (127.0.0.2) does not fit"),
            (node, "node 1 ends: node 0"),
        ):
            assert process.process.wait(60) == 1
            eventually(lambda started=process: difference in started.log)
            assert place in process.log
        assert "Traceback" not in server.log + node.log


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--nnodes", "2", "--node-rank", "2", "--headless"], "--node-rank is 2, but must be less than --nnodes 2"),
        (["--nnodes", "2", "--node-rank", "1"], "--node-rank 1 needs --headless"),
        (["--headless"], "--headless needs a --node-rank above 0"),
        (["--nnodes", "2"], "is 1, but must be a multiple of --nnodes 2"),
        (["-n", "2", "-tp", "2", "--data-parallel-size", "2"], "--data-parallel-size does not work with --nnodes 2"),
        (["-n", "2", "-tp", "2", "--on-engine-death", "restart"], "--on-engine-death does not work with --nnodes 2"),
        (["-n", "2", "-tp", "2", "--weight-update-path", "/"], "--weight-update-path does not work with --nnodes 2"),
        (["other/model", "-n", "2", "-tp", "2"], "--nnodes works with one MODEL"),
    ],
)
def test_settings_that_do_not_fit_are_refused(flags: list[str], error: str) -> None:
    from quire.app.serve import check_settings
    from quire.config.command import ConfigError
    from quire.config.commands import Serve

    with pytest.raises(ConfigError, match=error):
        check_settings(Serve.parse(["some/model", *flags]))


@dataclass
class Namespaces:
    """Two network namespaces with a cable between them. `holders`: processes that hold them."""

    holders: list[int]
    addresses: tuple[str, str] = ("10.213.7.1", "10.213.7.2")

    def run(self, number: int, *command: str) -> list[str]:
        """The command in a namespace."""
        return ["nsenter", "--net", "--target", str(self.holders[number]), *command]

    def pull_the_cable(self) -> None:
        subprocess.run(self.run(0, "ip", "link", "set", "cable0", "down"), check=True)


@pytest.fixture
def namespaces() -> Iterator[Namespaces]:
    if not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        pytest.skip("the commands ip, nsenter and unshare are missing")
    with ExitStack() as stack:
        holders = []
        for _ in range(2):
            holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
            stack.callback(holder.wait)
            assert holder.stdin is not None
            stack.callback(holder.stdin.close)
            holders.append(holder.pid)
        eventually(lambda: all(_has_own_network(pid) for pid in holders) or not all(map(psutil.pid_exists, holders)))
        made = Namespaces(holders)
        for number, address in enumerate(made.addresses):
            commands = [
                ["ip", "link", "set", "lo", "up"],
                ["ip", "addr", "add", f"{address}/24", "dev", f"cable{number}"],
            ]
            commands.append(["ip", "link", "set", f"cable{number}", "up"])
            if number == 0:
                peer = ["peer", "name", "cable1", "netns", str(holders[1])]
                commands.insert(0, ["ip", "link", "add", "cable0", "type", "veth", *peer])
            for command in commands:
                done = subprocess.run(made.run(number, *command), capture_output=True, text=True, check=False)
                if done.returncode:
                    pytest.skip(f"network namespaces are not permitted: {done.stderr.strip()}")
        yield made


def _has_own_network(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
    except OSError:
        return False


@contextmanager
def served_in(
    namespaces: Namespaces, folder: Path, tmp_path: Path, *flags: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """A node in each namespace; the server listens at a file. Their logs are in files."""
    common = [
        "--dtype",
        "float32",
        "--nnodes",
        "2",
        "--master-addr",
        namespaces.addresses[0],
        "--num-threads",
        "1",
        *flags,
    ]
    with ExitStack() as stack:
        nodes = []
        for number, own in enumerate((["--uds", str(tmp_path / "uds")], ["--node-rank", "1", "--headless"])):
            command = namespaces.run(number, sys.executable, "-m", "quire", "serve", str(folder), *common, *own)
            log = stack.enter_context((tmp_path / f"{number}.log").open("w"))
            process = subprocess.Popen(command, stderr=log, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            nodes.append(process)
        eventually(lambda: " at unix:" in (tmp_path / "0.log").read_text() or nodes[0].poll() is not None, PATIENCE)
        yield nodes


def _client(path: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://node", timeout=PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("-tp", "2"), ("-pp", "2"), ("-tp", "2", "--engine-process")], ids=" ".join)
def test_nodes_in_two_network_namespaces(
    flags: tuple[str, ...], namespaces: Namespaces, folder: Path, tmp_path: Path
) -> None:
    """They answer as one process does. When their cable is pulled in a stream, both end within seconds."""
    with serving(str(folder), "--dtype", "float32") as alone, alone.http as client:
        expected = client.post("/v1/completions", json=PROMPT).json()["choices"]
    with served_in(namespaces, folder, tmp_path, *flags) as nodes, _client(tmp_path / "uds") as client:
        assert client.post("/v1/completions", json=PROMPT).json()["choices"] == expected
        with client.stream("POST", "/v1/completions", json=LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
            namespaces.pull_the_cable()
            events = [line.removeprefix("data: ") for line in lines if line]
        assert "rank 1 of 2 on node 1 (10.213.7.2) has stopped" in json.loads(events[-2])["error"]["message"]
        assert [node.wait(60) for node in nodes] == [1, 1]  # Gloo alone would wait for ten minutes
    assert "node 1 ends: node 0 at 10.213.7.1:29501 has ended" in (tmp_path / "1.log").read_text()
    assert "Traceback" not in (tmp_path / "0.log").read_text() + (tmp_path / "1.log").read_text()
