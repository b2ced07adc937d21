"""Starts a core in a thread (the default) or in its own process, and detects its death."""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

CoreEntry = Callable[[str], None]  # runs a core on an address until it is shut down


class CoreHandle(Protocol):
    """A running core."""

    address: str

    def start(self, entry: CoreEntry, on_death: Callable[[str], None]) -> None:
        """Run `entry`; call `on_death` on this event loop if it ends without reporting an error."""

    async def join(self, seconds: float) -> None:
        """Wait until the core has ended; end it by force after `seconds` where that is possible."""


class ThreadCore:
    """A core in a thread. Its `entry` catches and reports every exception, so `on_death` is not needed."""

    def __init__(self) -> None:
        self.address = f"inproc://quire-{uuid.uuid4().hex}"
        self._thread: threading.Thread | None = None

    def start(self, entry: CoreEntry, on_death: Callable[[str], None]) -> None:
        """Run `entry` in a daemon thread."""
        self._thread = threading.Thread(target=entry, args=(self.address,), name="quire-engine", daemon=True)
        self._thread.start()

    async def join(self, seconds: float) -> None:
        """Wait until the thread has ended; a stuck thread ends with the process."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, seconds)


class ProcessCore:
    """A core in its own process, connected through a socket file in a private folder."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="quire-")
        self.address = f"ipc://{Path(self._folder.name) / 'engine'}"
        self._process: multiprocessing.process.BaseProcess | None = None

    def start(self, entry: CoreEntry, on_death: Callable[[str], None]) -> None:
        """Run `entry` in a new interpreter and watch the process."""
        process = multiprocessing.get_context("spawn").Process(
            target=_run_in_process, args=(entry, self.address), name="quire-engine", daemon=True
        )
        process.start()
        self._process = process
        # Runs before multiprocessing's own handler, which would wait forever for a process that ignores SIGTERM.
        atexit.register(process.kill)
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(process.sentinel)
            on_death(f"its process ended with exit code {process.exitcode}")

        loop.add_reader(process.sentinel, ended)

    @property
    def pid(self) -> int | None:
        """Process id; None before `start`."""
        return self._process.pid if self._process else None

    async def join(self, seconds: float) -> None:
        """Wait until the process has ended; kill it after `seconds`."""
        process = self._process
        if process is not None:
            asyncio.get_running_loop().remove_reader(process.sentinel)
            await asyncio.to_thread(process.join, seconds)
            if process.is_alive():
                process.kill()
                await asyncio.to_thread(process.join)
            atexit.unregister(process.kill)
        self._folder.cleanup()


def _run_in_process(entry: CoreEntry, address: str) -> None:
    """Entry point of a core's process. The server ends it by a message; it also ends when the server is killed."""
    # A terminal or supervisor sends these to all processes; the server finishes open requests first.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, name="quire-watch", daemon=True).start()
    entry(address)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
