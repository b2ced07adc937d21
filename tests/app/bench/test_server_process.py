"""Servers that benchmarks start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.support.variants import slow_but

# Prints the process of a server, and waits for a signal.
_BENCHMARK = """
import signal, sys
from quire.app.bench.server_process import started_server
with started_server([sys.executable, "-c", "import time; time.sleep(600)"]) as server:
    print(server.pid, flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("number", slow_but([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], signal.SIGTERM))
def test_a_signal_ends_the_server_too(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", _BENCHMARK], stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        server = int(benchmark.stdout.readline())
        assert psutil.pid_exists(server)
        os.kill(benchmark.pid, number)
        assert benchmark.wait(60) == 128 + number
    assert not psutil.pid_exists(server)
