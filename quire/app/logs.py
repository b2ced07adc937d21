"""Logging that never blocks: a thread writes the messages to standard error, as text or as JSON."""

from __future__ import annotations

import copy
import json
import logging
import os
import queue
import re
import select
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from logging.handlers import QueueHandler
from typing import Any

from typing_extensions import override

from quire.config.types import LogFormat
from quire.engine.client.origin import current_origin

_QUIET = ("httpx", "httpx2", "uvicorn.error")  # loggers whose `info` is not worth a line
# Of the client of MCP servers: it raises what it logs, and a server could fill the log.
_SILENT = ("mcp", "client")
_MAX_WAITING = 10_000  # messages; about 2 MB
_FLUSH_SECONDS = 0.5
_OWN_EXCEPTION = "    "  # before each line of an exception, so that none looks like a message of its own
# Line breaks and commands to terminals that a client may have sent, and what changes the direction of text.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")

Entry = logging.LogRecord | threading.Event  # an event is set once everything before it has been written


class TextLines(logging.Formatter):
    """Format a message as a line of text, and its exception as indented lines. Control characters are escaped."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        about = ", ".join(f"{name.removesuffix('_id')} {value}" for name, value in _about(record))
        line = f"{self.formatTime(record)} {record.levelname} {record.name}: {_escaped(record.getMessage().rstrip())}"
        line = f"{line} [{about}]" if about else line
        exception = (record.exc_text or "").splitlines()
        return "\n".join([line, *(_OWN_EXCEPTION + _escaped(part) for part in exception)])


class JsonLines(logging.Formatter):
    """Format a message as a JSON object in one line, with the fields of the message, if it has some."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **dict(_about(record)),
            **getattr(record, "fields", {}),
        }
        if record.exc_text:
            entry["exception"] = record.exc_text
        line = json.dumps(entry, ensure_ascii=False, default=str)  # which escapes only what JSON does not allow
        return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", line)


_FORMATTERS: dict[LogFormat, type[logging.Formatter]] = {"text": TextLines, "json": JsonLines}


def _about(record: logging.LogRecord) -> Iterator[tuple[str, str]]:
    """The ids of what a message is about."""
    for name in ("request_id", "trace_id", "span_id"):
        if value := getattr(record, name, ""):
            yield name, value


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class BackgroundHandler(QueueHandler):
    """Pass messages to a thread that writes them to a file descriptor.

    The reader of a pipe may stop reading, and a disk may be full. Then up to `limit` messages wait, and
    further ones are dropped, and their number is logged with the next line.
    """

    def __init__(self, descriptor: int, log_format: LogFormat = "text", limit: int = _MAX_WAITING) -> None:
        # A queue.Queue has a lock, which a signal handler that logs could wait for in vain.
        self._waiting: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        super().__init__(self._waiting)
        self._descriptor = descriptor
        self._limit = limit
        self._lines = _FORMATTERS[log_format]()
        self.dropped = 0
        threading.Thread(target=self._write_all, name="quire-log", daemon=True).start()

    @override
    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """A message without the objects of its caller, and with the ids of the request in whose task it was logged."""
        message = copy.copy(record)
        message.msg, message.args = record.getMessage(), None
        if record.exc_info:
            message.exc_text = self._lines.formatException(record.exc_info)
        message.exc_info = None
        origin = current_origin()
        if not hasattr(record, "request_id"):
            message.request_id = origin.request_id
        if (span := origin.span) is not None:
            message.trace_id, message.span_id = span.trace_id, span.span_id
        return message

    @override
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
            lines = [self._formatted(entry)]
            dropped = self.dropped
            if dropped > reported:
                text = "%d log messages were dropped, as they could not be written"
                lines.append(self._formatted(_warning(text, dropped - reported)))
            if self._write("".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")):
                reported = dropped
            else:
                self.dropped += 1

    def _formatted(self, entry: logging.LogRecord) -> str:
        try:
            return self._lines.format(entry)
        except Exception as error:  # noqa: BLE001 the edge of the thread, without which nothing is logged any more
            return self._lines.format(_warning("a message of %s could not be formatted: %r", entry.name, error))

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


def _warning(text: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("quire", logging.WARNING, __file__, 0, text, arguments, None)


def start_logging(level: str, log_format: LogFormat = "text") -> None:
    """Write messages of `level` and above to standard error, unless that is closed."""
    logging.captureWarnings(True)  # Python would write them itself, and wait for whoever reads standard error
    root = logging.getLogger()
    root.setLevel(level.upper())
    if not any(isinstance(handler, BackgroundHandler) for handler in root.handlers):
        root.addHandler(
            logging.NullHandler() if sys.stderr is None else BackgroundHandler(sys.stderr.fileno(), log_format)
        )
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in _SILENT:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def start_logging_in_copy(level: str, log_format: LogFormat = "text") -> None:
    """Write messages in a process that is a copy of another one, whose thread writes only that one's messages."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, BackgroundHandler):
            root.removeHandler(handler)
    start_logging(level, log_format)


def flush_logs() -> None:
    """Wait until all queued messages are written, at most half a second."""
    for handler in logging.getLogger().handlers:
        handler.flush()
