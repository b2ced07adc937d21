"""A process that has to end does, whatever its threads do."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.process import no_children_of

_STUCK = """
import threading, time
from quire.app.exits import end_process_after
from quire.app.logs import start_logging
start_logging("info")
threading.Thread(target=time.sleep, args=(1000,), name="renders-forever").start()
end_process_after(0.1)
"""
_WAITING = """
import multiprocessing, time
from quire.app.exits import end_on_signals
from quire.app.logs import start_logging

if __name__ == "__main__":
    start_logging("info")
    end_on_signals()
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(1000,))
    child.start()
    print(child.pid, flush=True)
    child.join()
"""
_IMPORTING = """
import signal, sys
from quire.app import cli, schemas

def imports():
    print("imports", flush=True)
    while True:
        signal.pause()

schemas.defer_schemas = imports
sys.argv = ["quire", "serve"]
cli.main()
"""


def test_a_stuck_thread_does_not_keep_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", _STUCK], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "did not stop in time" in ended.stderr
    assert "renders-forever" in ended.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)], ids=str)
def test_a_signal_ends_the_process_and_its_children(number: signal.Signals, status: int, tmp_path: object) -> None:
    script = f"{tmp_path}/script.py"
    with open(script, "w") as file:
        file.write(_WAITING)
    command = [sys.executable, script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == status
    assert f"stopped by {number.name}" in said
    assert "Traceback" not in said
    no_children_of([child])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)], ids=str)
def test_a_signal_ends_a_server_that_has_imported_nothing_yet(number: signal.Signals, status: int) -> None:
    command = [sys.executable, "-c", _IMPORTING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "imports\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == status
    assert not said
