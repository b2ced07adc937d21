"""Log messages are written by a thread, so that nobody waits for who reads them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator

import pytest

from quire.app import logs
from quire.app.logs import BackgroundHandler
from tests.support.process import eventually


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    log = logging.Logger("test", logging.INFO)
    yield log
    log.handlers.clear()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def read_until(descriptor: int, text: bytes) -> bytes:
    output = b""
    while text not in output:
        output += os.read(descriptor, 1 << 16)
    return output


def test_messages_arrive_in_order_and_formatted(logger: logging.Logger, pipe: tuple[int, int]) -> None:
    logger.addHandler(BackgroundHandler(pipe[1]))
    for number in range(3):
        logger.info("message %d", number)
    lines = read_until(pipe[0], b"message 2\n").decode().splitlines()
    assert [line.rpartition("test: ")[2] for line in lines] == ["message 0", "message 1", "message 2"]
    assert " INFO test: " in lines[0]


def test_a_pipe_that_nobody_reads_blocks_nobody(logger: logging.Logger, pipe: tuple[int, int]) -> None:
    handler = BackgroundHandler(pipe[1], limit=100)
    logger.addHandler(handler)
    for _ in range(2000):
        logger.info("x" * 1000)  # 2 MB, of which the pipe takes 64 KB
    assert handler.dropped >= 1000
    handler.flush()  # gives up, and may be called at exit
    reader = threading.Thread(target=read_until, args=(pipe[0], b"log messages were dropped"))
    reader.start()
    reader.join(10)
    assert not reader.is_alive()


def test_a_full_disk_loses_messages_and_nothing_else(logger: logging.Logger) -> None:
    with open("/dev/full", "wb") as full:
        handler = BackgroundHandler(full.fileno())
        logger.addHandler(handler)
        for _ in range(3):
            logger.error("it does not fit")
        eventually(lambda: handler.dropped == 3)


def test_a_non_blocking_pipe_gets_every_message(logger: logging.Logger, pipe: tuple[int, int]) -> None:
    """Another process that has the terminal or pipe open may have made it non-blocking."""
    os.set_blocking(pipe[1], False)
    logger.addHandler(BackgroundHandler(pipe[1]))
    for number in range(200):
        logger.info("%d %s", number, "x" * 1000)
    assert read_until(pipe[0], b"test: 199 ").count(b"\n") >= 199


def test_without_standard_error_there_are_no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.Logger("root")
    monkeypatch.setattr(logging, "getLogger", lambda name=None: root if name is None else logging.Logger(name))
    monkeypatch.setattr("sys.stderr", None)  # as with `2>&-`; the descriptor may then be anything, such as a client
    logs.start_logging("warning")
    assert root.level == logging.WARNING
    root.error("nobody to tell")
    logs.flush_logs()
