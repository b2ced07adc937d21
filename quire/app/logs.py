"""Logging that never blocks: a thread writes the messages to standard error."""

from __future__ import annotations

import logging
import os
import queue
import select
import sys
import threading
from logging.handlers import QueueHandler

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_QUIET = ("httpx", "httpx2", "uvicorn.error")  # loggers whose `info` is not worth a line
# Of the client of MCP servers: it raises what it logs, and a server could fill the log.
_SILENT = ("mcp", "client")
_MAX_WAITING = 10_000  # messages; about 2 MB
_FLUSH_SECONDS = 0.5

Entry = logging.LogRecord | threading.Event  # an event is set once everything before it has been written


class BackgroundHandler(QueueHandler):
    """Pass messages to a thread that writes them to a file descriptor.

    The reader of a pipe may stop reading, and a disk may be full. Then up to `limit` messages wait, and
    further ones are dropped, and their number is logged with the next line.
    """

    def __init__(self, descriptor: int, limit: int = _MAX_WAITING) -> None:
        # A queue.Queue has a lock, which a signal handler that logs could wait for in vain.
        self._waiting: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        super().__init__(self._waiting)
        self._descriptor = descriptor
        self._limit = limit
        self._lines = logging.Formatter(_FORMAT)
        self.dropped = 0
        threading.Thread(target=self._write_all, name="quire-log", daemon=True).start()

    def enqueue(self, record: logging.LogRecord) -> None:
        """Pass a message on, or drop it."""
        if self._waiting.qsize() >= self._limit:
            self.dropped += 1
        else:
            self._waiting.put(record)

    def flush(self) -> None:
        """Wait until all messages have been written, but not for long."""
        written = threading.Event()
        self._waiting.put(written)
        written.wait(_FLUSH_SECONDS)

    def _write_all(self) -> None:
        reported = 0
        while True:
            entry = self._waiting.get()
            if isinstance(entry, threading.Event):
                entry.set()
                continue
            line = self._lines.format(entry)
            dropped = self.dropped
            if dropped > reported:
                line = f"{line}\n({dropped - reported} log messages were dropped, as they could not be written)"
            if self._write(f"{line}\n".encode(errors="backslashreplace")):
                reported = dropped
            else:
                self.dropped += 1

    def _write(self, data: bytes) -> bool:
        """Write without Python's file objects, whose lock would have to be free when the process ends."""
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another process has made the shared descriptor non-blocking
                select.select([], [self._descriptor], [])
            except OSError:  # a full disk, or a closed pipe
                return False
        return True


def start_logging(level: str) -> None:
    """Write messages of `level` and above to standard error, unless that is closed."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    if not any(isinstance(handler, BackgroundHandler) for handler in root.handlers):
        root.addHandler(logging.NullHandler() if sys.stderr is None else BackgroundHandler(sys.stderr.fileno()))
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in _SILENT:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def flush_logs() -> None:
    """Wait until all queued messages are written, at most half a second."""
    for handler in logging.getLogger().handlers:
        handler.flush()
