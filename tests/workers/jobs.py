"""Jobs of the tests of worker pools."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def factory(prefix: str = "") -> Callable[[tuple[str, Any]], Any]:
    """Does the job of a name with one argument."""

    def announce(work: tuple[Path, tuple[str, Any]]) -> Any:
        """Do a job after a file has been made, by which a test knows that the job runs."""
        file, job = work
        file.touch()
        return jobs[job[0]](job[1])

    jobs: dict[str, Callable[[Any], Any]] = {
        "announce": announce,
        "echo": lambda value: prefix + value if prefix else value,
        "array": _array,
        "fail": _fail,
        "allocate": lambda size: len(bytearray(size)),
        "recurse": _recurse,
        "spin": lambda _: _spin(),
        "sleep": time.sleep,
        "exit": os._exit,
        "kill": _kill,
        "pid": lambda _: os.getpid(),
        "local function": lambda _: lambda: None,
        "sockets": lambda _: [
            link for entry in Path("/proc/self/fd").iterdir() if (link := _link(entry)).startswith("socket")
        ],
    }
    return lambda job: jobs[job[0]](job[1])


def broken() -> Callable[[Any], Any]:
    """A factory that fails."""
    raise ValueError("there is nothing to work with")


def _array(size: int) -> Any:
    import numpy as np  # takes a while

    return np.arange(size, dtype=np.float32)


def _fail(text: str) -> None:
    raise LookupError(text)


def _kill(file: Path) -> str:
    """Is killed in the first two processes; the file says how many there were."""
    with file.open("a") as started:
        started.write(".")
    if len(file.read_text()) <= 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def _spin() -> None:
    while True:
        pass


def _recurse(_: Any) -> None:
    """Overflow the stack of native code."""
    sys.setrecursionlimit(1 << 30)

    def again(_: int) -> int:
        return sorted([1], key=again)[0]

    again(0)


def _link(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except OSError:  # the listing's own
        return ""
