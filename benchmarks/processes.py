"""Servers in processes, and the CPU time of their processes and of all others."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

_STOP_SECONDS = 20
# It reads a line if the server has been stopped, and the end of the file if the process that wrote to it has died.
_STOP_ORPHAN = """
read -r stopped && exit
kill -s TERM -- "-$1"
for second in $(seq "$2"); do kill -s 0 -- "-$1" || exit; sleep 1; done
kill -s KILL -- "-$1"
"""
_SESSION, _USER, _SYSTEM = 3, 11, 12  # fields of /proc/PID/stat behind the name; see proc(5)


def session_seconds(session: int) -> float:
    """Return the CPU time so far, in seconds, of all processes of a session."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
            ticks += int(fields[_USER]) + int(fields[_SYSTEM]) if int(fields[_SESSION]) == session else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> float:
    """Return the MiB of a process and its children; pages that they share are counted once."""
    server = psutil.Process(pid)
    return sum(process.memory_full_info().pss for process in (server, *server.children(recursive=True))) / 2**20


def busy_seconds() -> float:
    """Return the CPU time so far, in seconds, of all processes of the machine."""
    user, nice, system, _, _, interrupts, soft_interrupts, *_ = (
        int(field) for field in Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:]
    )
    return (user + nice + system + interrupts + soft_interrupts) / os.sysconf("SC_CLK_TCK")


class Server:
    """A server that runs a command, in a process session of its own.

    It ends with this process, also if that is killed: else it would answer the next benchmark on its port. A shell
    waits for that, as the kernel's own signal would not reach the children, and exists on Linux only.
    """

    def __init__(self, command: str, port: int, log: Path, **values: object) -> None:
        """Start it. `values`: of placeholders such as {model} in the command, beside {port}."""
        for placeholder, value in {"port": port, **values}.items():
            command = command.replace(f"{{{placeholder}}}", str(value))
        self.url = f"http://127.0.0.1:{port}/v1"
        self._log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(shlex.split(command), stdout=file, stderr=file, start_new_session=True)
        self._watcher = subprocess.Popen(
            ["sh", "-c", _STOP_ORPHAN, "sh", str(self._process.pid), str(_STOP_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what stops this process by its group leaves the shell alone
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        self._watcher.communicate(b"stopped\n")

    def check_running(self) -> None:
        """Raise RuntimeError if it has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"it ended with code {self._process.returncode}: see {self._log}")

    def cpu_seconds(self) -> float:
        """Return the CPU time of its processes."""
        return session_seconds(self._process.pid)

    def memory(self) -> float:
        """Return the MiB of its processes."""
        return memory_of(self._process.pid)
