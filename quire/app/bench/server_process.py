"""A server that a benchmark starts, and that ends with the benchmark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from quire.app.exits import end_process, handling_signals

_EXIT_SECONDS = 30


def serve_command(*words: str, command: str = "serve") -> list[str]:
    """The command of a server with these arguments of `quire serve`, or of another command that serves."""
    return [sys.executable, "-m", "quire", command, *words]


@contextmanager
def started_server(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a server, which ends behind the block, and if a signal ends this process.

    Args:
        command: of the server.
        options: those of `Popen`.
    """
    processes: list[subprocess.Popen[Any]] = []
    received: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        received.append(number)
        if processes:
            _end(processes[0])
            end_process(128 + number)

    with handling_signals(stop), subprocess.Popen(command, stdin=subprocess.DEVNULL, **options) as process:  # noqa: S603 our own command
        processes.append(process)
        if received:  # while it was started
            stop(received[0], None)
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
