"""ProcessCore: the core's process ignores signals, and ends together with its server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.errors import EngineDead
from quire.engine.client.launch import ProcessCore, ThreadCore, forked_process
from quire.engine.client.protocol import Ready
from quire.engine.client.slots import Slots
from quire.engine.client.transport import ClientChannel
from tests.support.fake_core import INFO, FakeCore, running_client
from tests.support.process import no_children_of
from tests.support.text_requests import collect, text_request
from tests.support.tokenizer import byte_tokenizer
from tests.support.variants import slow_but


def run_fake_core(address: str) -> None:
    """Entry point with a fake core, importable from another process."""
    FakeCore()(address)


@pytest.mark.parametrize("sent", slow_but([signal.SIGINT, signal.SIGTERM], signal.SIGINT))
async def test_the_core_ignores_signals(sent: signal.Signals) -> None:
    handle = ProcessCore()
    async with running_client(run_fake_core, handle=handle) as client:
        assert handle.pid is not None
        os.kill(handle.pid, sent)
        await asyncio.sleep(0.2)
        assert (await collect(client, text_request()))[0] == "HELLO"
    assert handle._process is not None
    assert handle._process.exitcode == 0


_EXITS_WITHOUT_SHUTDOWN = """
import asyncio, functools, time
from quire.engine.client.launch import ProcessCore
from tests.engine.client.test_launch import ready_then_stuck
from quire.engine.client.transport import ClientChannel

async def main():
    handle = ProcessCore()
    front = ClientChannel(handle.address)
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
    from quire.engine.client.transport import CoreChannel

    channel = CoreChannel(address)
    channel.send(Ready(INFO))
    signal.pause()


class SlowToRead:
    """An entry whose arguments take long to read, as importing torch does."""

    def __call__(self, address: str) -> None: ...

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return time.sleep, (1000,)


async def test_a_core_that_has_not_connected_is_ended_at_once() -> None:
    handle = ProcessCore()
    client = EngineClient(ClientChannel(handle.address), byte_tokenizer(), Slots(1, 1.0))
    handle.start(SlowToRead(), client.fail)
    assert handle.pid is not None
    assert not await client.close()
    async with asyncio.timeout(60):
        await handle.join(0)
    with pytest.raises(ProcessLookupError):
        os.kill(handle.pid, 0)
    assert not Path(handle.address.removeprefix("ipc://")).parent.exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_core_in_a_thread_that_ends_without_a_word_is_noticed() -> None:
    def core(_: str) -> None:
        raise KeyboardInterrupt("not an Exception")

    handle = ThreadCore()
    client = EngineClient(ClientChannel(handle.address), byte_tokenizer(), Slots(1, 1.0))
    handle.start(core, client.fail)
    with pytest.raises(EngineDead, match="its thread ended with KeyboardInterrupt"):
        await client.ready()
    await client.close()
    await handle.join(60)


_IS_KILLED = """
import asyncio, os, signal
from quire.engine.client.launch import ProcessCore
from tests.engine.client.test_launch import SlowToRead

async def main():
    handle = ProcessCore()
    handle.start(SlowToRead(), print)
    print(handle.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_core_that_is_still_being_started_ends_when_its_server_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(_IS_KILLED)
    env = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    killed = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=env, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    no_children_of([int(killed.stdout)])


def test_the_core_ends_when_its_server_exits(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(_EXITS_WITHOUT_SHUTDOWN)
    env = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, str(script)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)
    assert finished.returncode == 3, finished.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(finished.stdout), 0)


def test_a_process_with_threads_is_not_copied() -> None:
    """Locks that they held would never be released."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert isinstance(forked_process(print, (), "copy"), SpawnProcess)
    finally:
        end.set()
        thread.join()
