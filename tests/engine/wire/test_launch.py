"""A core's process ends when it is told to, and never outlives or holds up its server."""

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


def answer(address: str) -> None:
    """A fake core as an entry that another process can import."""
    FakeCore()(address)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
async def test_signals_to_all_leave_the_core_alive(sent: signal.Signals) -> None:
    handle = ProcessCore()
    async with running_client(answer, handle=handle) as client:
        assert handle.pid is not None
        os.kill(handle.pid, sent)
        await asyncio.sleep(0.2)
        assert (await collect(client, request()))[0] == "HELLO"
    assert handle._process is not None
    assert handle._process.exitcode == 0


_LEAVES_IT_BEHIND = """
import asyncio, functools, time
from quire.engine.wire.launch import ProcessCore
from tests.engine.wire.test_launch import ready_then_deaf
from quire.engine.wire.transport import FrontChannel

async def main():
    handle = ProcessCore()
    front = FrontChannel(handle.address)
    handle.start(ready_then_deaf, print)
    came = asyncio.get_running_loop().create_future()
    front.listen(came.set_result)
    await came
    print(handle.pid, flush=True)
    raise SystemExit(3)

if __name__ == "__main__":
    asyncio.run(main())
"""


def ready_then_deaf(address: str) -> None:
    """A core that is stuck for good."""
    from quire.engine.wire.transport import CoreChannel

    channel = CoreChannel(address)
    channel.send(Ready(INFO))
    signal.pause()


def test_a_server_that_fails_takes_its_core_along(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(_LEAVES_IT_BEHIND)
    env = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)
    assert done.returncode == 3, done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
