"""ProcessCore: the core's process ignores signals, and ends together with its server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quire.engine.wire.launch import ProcessCore
from quire.engine.wire.protocol import Ready
from tests.engine.wire.test_client import collect, request
from tests.support.fake_core import INFO, FakeCore, running_client


def run_fake_core(address: str) -> None:
    """Entry point with a fake core, importable from another process."""
    FakeCore()(address)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
async def test_the_core_ignores_signals(sent: signal.Signals) -> None:
    handle = ProcessCore()
    async with running_client(run_fake_core, handle=handle) as client:
        assert handle.pid is not None
        os.kill(handle.pid, sent)
        await asyncio.sleep(0.2)
        assert (await collect(client, request()))[0] == "HELLO"
    assert handle._process is not None
    assert handle._process.exitcode == 0


_EXITS_WITHOUT_SHUTDOWN = """
import asyncio, functools, time
from quire.engine.wire.launch import ProcessCore
from tests.engine.wire.test_launch import ready_then_stuck
from quire.engine.wire.transport import FrontChannel

async def main():
    handle = ProcessCore()
    front = FrontChannel(handle.address)
    handle.start(ready_then_stuck, print)
    received = asyncio.get_running_loop().create_future()
    front.listen(received.set_result)
    await received
    print(handle.pid, flush=True)
    raise SystemExit(3)

if __name__ == "__main__":
    asyncio.run(main())
"""


def ready_then_stuck(address: str) -> None:
    """A core that reports that it is ready, then never answers."""
    from quire.engine.wire.transport import CoreChannel

    channel = CoreChannel(address)
    channel.send(Ready(INFO))
    signal.pause()


def test_the_core_ends_when_its_server_exits(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(_EXITS_WITHOUT_SHUTDOWN)
    env = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, str(script)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)
    assert finished.returncode == 3, finished.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(finished.stdout), 0)
