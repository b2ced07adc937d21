"""Ends the process without waiting for anything: on signals before it serves, and when its shutdown takes too long."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from quire.app.logs import flush_logs
from quire.engine.client.launch import kill_processes

logger = logging.getLogger("quire")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_INTERRUPTED = 130  # exit status, as of a shell


def end_process(status: int) -> NoReturn:
    """End this process and its children at once. Python's own way to exit waits for threads."""
    kill_processes()
    flush_logs()
    os._exit(status)


def end_process_after(seconds: float) -> None:
    """End the process by force if it still runs after `seconds`."""

    def end() -> None:
        time.sleep(seconds)
        names = sorted({thread.name for thread in threading.enumerate()})
        logger.error(
            "the server did not stop in time: its process is ended by force; threads that run: %s", ", ".join(names)
        )
        end_process(1)

    # Not threading.Thread: a signal handler calls this, and may have interrupted code that holds threading's lock.
    _thread.start_new_thread(end, ())


def end_on_signals() -> None:
    """End the process on SIGTERM, SIGINT or SIGHUP, until something else handles them.

    Nothing is raised: an exception from a signal handler gets lost, or ends the process by force, if it arrives while
    native libraries such as torch are being imported.
    """
    _handle_signals(_end)


@contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handler` on SIGTERM, SIGINT or SIGHUP inside the block."""
    before = _handle_signals(handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _handle_signals(handler: Callable[[int, FrameType | None], None]) -> dict[int, signal._HANDLER]:
    """Install a handler; returns the ones before. A signal that is ignored, as by nohup, stays ignored."""
    before: dict[int, signal._HANDLER] = {number: signal.getsignal(number) for number in _SIGNALS}
    before = {number: previous for number, previous in before.items() if previous is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    return before


def _end(number: int, _: FrameType | None) -> None:
    logger.info("stopped by %s", signal.Signals(number).name)
    end_process(_INTERRUPTED if number == signal.SIGINT else 0)
