"""Log messages are written by a thread, so that nobody waits for who reads them."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.app import logs
from quire.app.logs import BackgroundHandler
from quire.engine.client.origin import Origin, set_current_origin
from quire.engine.client.trace_context import TraceContext
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


FORGED = "line\n2026-01-01 00:00:00,000 INFO quire: forged \x1b[2J\u2028\u202e"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def fail() -> None:
    raise ValueError(FORGED)


def log_of_a_failure(logger: logging.Logger) -> None:
    """Log a message and an exception with text of a client."""
    logger.info("said %s", FORGED)
    try:
        fail()
    except ValueError:
        logger.exception("it failed")


def test_text_of_clients_makes_no_line_of_its_own(logger: logging.Logger, pipe: tuple[int, int]) -> None:
    handler = BackgroundHandler(pipe[1])
    logger.addHandler(handler)
    log_of_a_failure(logger)
    handler.flush()
    said, failed, *exception, _ = os.read(pipe[0], 1 << 16).decode().split("\n")
    assert said.endswith(r"test: said line\n2026-01-01 00:00:00,000 INFO quire: forged \x1b[2J\u2028\u202e")
    assert failed.endswith("ERROR test: it failed")
    assert all(line.startswith("    ") for line in exception)


async def test_messages_name_the_request_in_whose_task_they_are(logger: logging.Logger, pipe: tuple[int, int]) -> None:
    handlers = [BackgroundHandler(pipe[1], "text"), BackgroundHandler(pipe[1], "json")]
    set_current_origin(Origin("mine", TraceContext.parse(PARENT)))
    for handler in handlers:
        logger.handlers = [handler]
        logger.info("hello", extra={"fields": {"status": 200}})
        handler.flush()
    text, line = os.read(pipe[0], 1 << 16).decode().splitlines()
    trace, span = PARENT.split("-")[1:3]
    assert text.endswith(f"INFO test: hello [request mine, trace {trace}, span {span}]")
    entry = json.loads(line)
    assert entry.pop("timestamp").endswith("+00:00")
    assert entry == {
        "level": "info",
        "logger": "test",
        "message": "hello",
        "request_id": "mine",
        "trace_id": trace,
        "span_id": span,
        "status": 200,
    }


def test_json_has_an_object_in_each_line(logger: logging.Logger, pipe: tuple[int, int]) -> None:
    handler = BackgroundHandler(pipe[1], "json")
    logger.addHandler(handler)
    log_of_a_failure(logger)
    logger.info("odd \ud800 \x85")
    handler.flush()
    said, failed, odd = map(json.loads, os.read(pipe[0], 1 << 16).decode().splitlines())
    assert said["message"] == f"said {FORGED}"
    assert failed["exception"].startswith("Traceback")
    assert f"ValueError: {FORGED}" in failed["exception"]
    assert odd["message"] == "odd \ud800 \x85"


def test_fields_that_are_no_json_stop_no_later_message(logger: logging.Logger, pipe: tuple[int, int]) -> None:
    handler = BackgroundHandler(pipe[1], "json")
    logger.addHandler(handler)
    logger.info("one", extra={"fields": {"folder": Path("/models")}})
    logger.info("two", extra={"fields": "of another library"})
    logger.info("three")
    handler.flush()
    one, two, three = map(json.loads, os.read(pipe[0], 1 << 16).decode().splitlines())
    assert (one["folder"], two["level"], three["message"]) == ("/models", "warning", "three")


def test_a_pipe_that_nobody_reads_blocks_nobody(logger: logging.Logger, pipe: tuple[int, int]) -> None:
    handler = BackgroundHandler(pipe[1], limit=100)
    logger.addHandler(handler)
    for _ in range(2000):
        logger.info("x" * 1000)  # 2 MB, of which the pipe takes 64 KB
    assert handler.dropped >= 1000
    handler.flush()  # gives up, and may be called at exit
    reader = threading.Thread(target=read_until, args=(pipe[0], b"log messages were dropped"))
    reader.start()
    reader.join(60)
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
