"""`quire serve` as a process of its own, as users run it."""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import httpx
import psutil

from tests.support.patience import PATIENCE
from tests.support.preloaded import ForkedProcess, start
from tests.support.tokenizer import write_tokenizer


@dataclass
class ServerProcess:
    """A server that listens, its address and what it has printed so far."""

    process: ForkedProcess
    url: str = ""
    lines: list[str] = field(default_factory=list)
    listening: threading.Event = field(default_factory=threading.Event)  # or it has ended

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        page = httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text
        return sum(float(line.split()[-1]) for line in page.splitlines() if re.match(rf"quire:{name}[{{ ]", line))


@contextmanager
def serving(
    *arguments: str, env: dict[str, str] | None = None, new_interpreters: bool = False, command: str = "serve"
) -> Iterator[ServerProcess]:
    """Run `quire serve` on a free port until it says where it listens; end it afterwards.

    Args:
        arguments: of the command.
        env: changes of the environment.
        new_interpreters: start its cores and ranks as users' servers do, which takes seconds.
        command: another command that serves.
    """
    with starting(*arguments, env=env, new_interpreters=new_interpreters, command=command) as server:
        wait_until_it_listens(server)
        yield server


def wait_until_it_listens(server: ServerProcess) -> None:
    """Wait until a server says where it listens."""
    assert server.listening.wait(PATIENCE), server.log
    assert server.url, server.log


@contextmanager
def starting(
    *arguments: str, env: dict[str, str] | None = None, new_interpreters: bool = False, command: str = "serve"
) -> Iterator[ServerProcess]:
    """Run `quire serve` as `serving` does, without waiting for it."""
    reading, writing = os.pipe()
    with open(os.devnull) as nothing:
        words = (command, *arguments, "--port", "0")
        env = {**os.environ, "QUIRE_NUM_THREADS": "1", **(env or {})}
        process = start(words, env, nothing.fileno(), writing, writing, new_interpreters=new_interpreters)
    os.close(writing)
    output = os.fdopen(reading, encoding="utf-8")
    server = ServerProcess(process)

    def read() -> None:
        for line in output:
            server.lines.append(line)
            if match := re.search(r"at ((?:https?://|unix:)[^\s\"]+)", line):
                server.url = match[1]
                server.listening.set()
        server.listening.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield server
    finally:
        process.kill()
        process.wait()
        reader.join(5)
        output.close()


def failing(*arguments: str) -> str:
    """Output of a server that cannot start."""
    status, output, errors = ended("serve", *arguments)
    assert status > 0
    return output + errors


def ended(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """Exit status, output and errors of the `quire` command."""
    with TemporaryFile() as sent, TemporaryFile() as output, TemporaryFile() as errors:
        sent.write(stdin)
        sent.seek(0)
        process = start(arguments, dict(os.environ), sent.fileno(), output.fileno(), errors.fileno())
        try:
            status = process.wait(280)
        finally:
            process.kill()
        output.seek(0)
        errors.seek(0)
        return status, output.read().decode(), errors.read().decode()


def quire(*arguments: str, stdin: str | None = None, status: int = 0) -> str:
    """What the `quire` command prints; its errors as well if another status than 0 is expected."""
    ended_with, output, errors = ended(*arguments, stdin=(stdin or "").encode())
    assert ended_with == status, output + errors
    return output + (errors if status else "")


def free_port() -> int:
    """A TCP port that nobody listens on at this moment. It is below those that connections get by themselves."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def cores_and_ranks(server: ServerProcess) -> list[psutil.Process]:
    """Those processes of a server that run a core or a rank, in the order of their starts."""
    started, served = [], {server.process.pid}  # processes that have another one fork for them
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended since, as short-lived helpers do
            command, name = command_of(child), child.name()
            forked = "preloaded" in command and child.ppid() not in served
            if name == "quire-engine":
                served.add(child.pid)
            if "spawn_main" in command or forked or name.startswith("quire-engine"):
                started.append((child.create_time(), child.pid, child))
    return [child for *_, child in sorted(started, key=lambda entry: entry[:2])]


def assert_all_have_ended(processes: list[psutil.Process]) -> None:
    """Check that processes end soon."""
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive


def command_of(process: psutil.Process) -> str:
    """The command line of a process; empty if it has ended, as short-lived helpers do."""
    try:
        return str(process.cmdline())
    except psutil.Error:
        return ""


def no_children_of(pids: list[int]) -> None:
    """Check that processes end soon, without anybody's help."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


def tiny_model(folder: Path, case: str = "llama", **changes: Any) -> Path:
    """A random model with the byte tokenizer, small enough to start at once."""
    from tests.support.models import make_model, save_model  # imports torch, which takes seconds in each process

    save_model(make_model(case, **changes), folder)
    write_tokenizer(folder)
    return folder


def eventually(condition: object, seconds: float = 60) -> None:
    """Wait for what another process brings about."""
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)
