"""The pool of threads that kernels share their work with."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from quire.kernels import native
from quire.kernels.capture import CapturedCalls, Workspace
from quire.kernels.linear import PackedBFloat16

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="without compiled kernels there is no pool")
WRAP = 2**32  # of the counter of a pool's calls
linux = pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")


def test_callers_on_several_threads_do_not_interfere() -> None:
    panels = PackedBFloat16(torch.randn(2048, 512).bfloat16())
    inputs = [torch.randn(3, 512).bfloat16() for _ in range(4)]
    expected = [panels(x, None) for x in inputs]
    wrong: list[int] = []

    def call(index: int) -> None:
        wrong.extend(index for _ in range(200) if not torch.equal(panels(inputs[index], None), expected[index]))

    threads = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same(threads: int) -> None:
    panels, x = PackedBFloat16(torch.randn(4096, 256).bfloat16()), torch.randn(40, 256).bfloat16()
    expected = panels(x, None)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert all(torch.equal(panels(x, None), expected) for _ in range(100))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("idle", [0.0, 0.002])
def test_the_counter_of_calls_may_wrap(idle: float) -> None:
    """While helper threads spin, and after they have gone to sleep."""
    panels, x = PackedBFloat16(torch.randn(4096, 256).bfloat16()), torch.randn(40, 256).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        expected = panels(x, None)
        for begin in (WRAP - 2, WRAP - 40):
            native.kernels.set_pool_calls(begin)
            for _ in range(50):
                assert torch.equal(panels(x, None), expected)
                time.sleep(idle)
            assert 0 < native.kernels.pool_calls() < 200
    finally:
        torch.set_num_threads(before)


def test_replays_across_the_wrap() -> None:
    panels, x, out = (
        PackedBFloat16(torch.randn(64, 256).bfloat16()),
        torch.randn(40, 256).bfloat16(),
        torch.zeros(40, 64),
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = panels(x, None, out_dtype=torch.float32)
        with torch.inference_mode():
            captured = CapturedCalls(lambda: panels(x, None, out=out), Workspace(40), (40, 40))
        native.kernels.set_pool_calls(WRAP - 20)
        for _ in range(30):
            out.zero_()
            captured.replay((40, 40))
            assert torch.equal(out, expected)
        assert 0 < native.kernels.pool_calls() < 200
    finally:
        torch.set_num_threads(before)


def test_the_counter_is_even_between_calls() -> None:
    for calls in (-2, 3, WRAP):
        with pytest.raises(ValueError, match="even number"):
            native.kernels.set_pool_calls(calls)


@linux
def test_helpers_end_with_the_thread_that_called_kernels() -> None:
    panels, x = PackedBFloat16(torch.randn(4096, 256).bfloat16()), torch.randn(40, 256).bfloat16()
    panels(x, None)  # the main thread's pool stays
    helpers: set[str] = set()

    def call() -> None:
        here = _threads()
        torch.set_num_threads(4)
        panels(x, None)
        helpers.update(_threads() - here)

    threads = torch.get_num_threads()
    try:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(threads)
    assert len(helpers) == 3
    deadline = time.monotonic() + 60
    while helpers & _threads() and time.monotonic() < deadline:  # join() returns before the thread's destructors
        time.sleep(0.01)
    assert not helpers & _threads()


_PROGRAM = """
import threading, torch
from quire.kernels.linear import PackedBFloat16
torch.set_num_threads(4)
panels, x = PackedBFloat16(torch.randn(512, 256).bfloat16()), torch.randn(40, 256).bfloat16()
out = panels(x, None)
called = threading.Event()
def call():
    while True:
        panels(x, None, out=out)  # without torch.empty, as torch aborts if a thread ends there
        called.set()
threading.Thread(target=call, daemon=True).start()
called.wait()
print("done")
"""


def test_the_interpreter_exits_while_pools_exist() -> None:
    """Those of the main thread and of a daemon thread that is calling kernels."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert (result.returncode, result.stdout.strip()) == (0, "done"), result.stderr


def _threads() -> set[str]:
    """Ids of this process's threads: those of earlier tests may end meanwhile, so that a count says nothing."""
    return set(os.listdir("/proc/self/task"))
