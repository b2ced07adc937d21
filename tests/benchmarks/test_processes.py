"""Servers that benchmarks start."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.processes import Server

BENCHMARK = """
import sys
from pathlib import Path
from benchmarks.processes import Server
server = Server(sys.argv[1], 1, Path(sys.argv[2]))
print("started", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A named pipe that servers hold open."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def command_of(pipe: Path) -> str:
    """A server whose child writes one line to the pipe, and holds it open until both have ended."""
    script = f"exec >{shlex.quote(str(pipe))}; echo started; sleep 600 & wait"
    return shlex.join(["sh", "-c", script])


def test_a_server_ends_with_a_benchmark_that_is_killed(pipe: Path, tmp_path: Path) -> None:
    arguments = [command_of(pipe), str(tmp_path / "log")]
    command = [sys.executable, "-c", BENCHMARK, *arguments]
    benchmark = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with benchmark, pipe.open() as output:
        assert output.readline() == "started\n"
        assert benchmark.stdout is not None
        assert benchmark.stdout.readline() == b"started\n"
        benchmark.kill()
        assert output.read() == ""  # once no process has it open


def test_a_server_is_stopped_with_its_children(pipe: Path, tmp_path: Path) -> None:
    with Server(command_of(pipe), 1, tmp_path / "log") as server:
        output = pipe.open()
        assert output.readline() == "started\n"
        server.check_running()
    with output:
        assert output.read() == ""
    with pytest.raises(RuntimeError, match=f"ended with code -15: see {tmp_path / 'log'}"):
        server.check_running()
