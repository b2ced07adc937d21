"""Starts a core in a thread (the default) or in a process of its own, and notices its death."""

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

CoreEntry = Callable[[str], None]  # runs a core on an address until it is told to end


class CoreHandle(Protocol):
    """A running core."""

    address: str

    def start(self, entry: CoreEntry, on_death: Callable[[str], None]) -> None:
        """Run `entry`; call `on_death` on this event loop should it end without a word."""

    async def join(self, seconds: float) -> None:
        """Wait for its end, and force it after so many seconds where that is possible."""


class ThreadCore:
    """A core in a thread. It reports its own death, as its `entry` sees every exception."""

    def __init__(self) -> None:
        self.address = f"inproc://quire-{uuid.uuid4().hex}"
        self._thread: threading.Thread | None = None

    def start(self, entry: CoreEntry, on_death: Callable[[str], None]) -> None:
        """Run `entry` in a daemon thread."""
        self._thread = threading.Thread(target=entry, args=(self.address,), name="quire-engine", daemon=True)
        self._thread.start()

    async def join(self, seconds: float) -> None:
        """Wait for its end; a thread that is stuck dies with the process."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, seconds)


class ProcessCore:
    """A core in a process of its own, over a socket file in a private folder."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="quire-")
        self.address = f"ipc://{Path(self._folder.name) / 'engine'}"
        self._process: multiprocessing.process.BaseProcess | None = None

    def start(self, entry: CoreEntry, on_death: Callable[[str], None]) -> None:
        """Run `entry` in a fresh interpreter and watch over it."""
        process = multiprocessing.get_context("spawn").Process(
            target=_run_beside_parent, args=(entry, self.address), name="quire-engine", daemon=True
        )
        process.start()
        self._process = process
        # Before multiprocessing's own handler, which would wait for ever for a process that ignores SIGTERM.
        atexit.register(process.kill)
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(process.sentinel)
            on_death(f"its process ended with exit code {process.exitcode}")

        loop.add_reader(process.sentinel, ended)

    @property
    def pid(self) -> int | None:
        """The process's id."""
        return self._process.pid if self._process else None

    async def join(self, seconds: float) -> None:
        """Wait for its end, and kill it after so many seconds."""
        process = self._process
        if process is not None:
            asyncio.get_running_loop().remove_reader(process.sentinel)
            await asyncio.to_thread(process.join, seconds)
            if process.is_alive():
                process.kill()
                await asyncio.to_thread(process.join)
            atexit.unregister(process.kill)
        self._folder.cleanup()


def _run_beside_parent(entry: CoreEntry, address: str) -> None:
    """Body of a core's process: the server ends it, by message, and it must not outlive even one that is killed."""
    for sent_to_all in (signal.SIGINT, signal.SIGTERM):  # by a terminal or a supervisor; open answers are drained first
        signal.signal(sent_to_all, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="quire-watch", daemon=True).start()
    entry(address)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
