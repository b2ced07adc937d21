"""Worker processes that are forked from one that has imported what they need: a start takes milliseconds."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import signal
import socket
import subprocess
import threading
from multiprocessing.connection import wait
from pathlib import Path

from quire.workers import child, process

MODULES = (
    "quire.multimodal.audio.decode",
    "quire.multimodal.documents",
    "quire.multimodal.pictures.decode",
    "quire.multimodal.videos.decode",
    "quire.parsing.structured.compilation",
    "quire.rendering.prompts",
)
NAME = "worker"  # of processes, by which tests tell them from others
start_interpreter = process._create  # as users' servers do


class ForkedWorker:
    """A forked worker process, with those methods of `subprocess.Popen` that its owner uses."""

    def __init__(self, connection: socket.socket) -> None:
        with connection:
            self._process = multiprocessing.get_context("forkserver").Process(target=_work, args=(connection,))
            self._process.start()
        # Its owner waits for it, maybe in another thread than multiprocessing would.
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]
        self._asking = threading.Lock()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit status, that of a signal being negative; None while it runs."""
        with self._asking:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        wait([self._process.sentinel], timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            self._process.kill()


def _work(connection: socket.socket) -> None:
    """Make this process like one that has just been started for a worker, and serve its jobs."""
    Path("/proc/self/comm").write_text(NAME)
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    with connection, open(os.devnull, "wb") as nothing:
        os.dup2(connection.fileno(), 0)
        for standard in (1, 2):
            os.dup2(nothing.fileno(), standard)
    child.main()
