"""Threads for native code that recurses as deeply as a grammar is nested."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

# Twice the stack of the front end's worker processes: a grammar that compiles there compiles here as well. Only used
# pages take memory.
_STACK = 128 << 20  # bytes
_changing = threading.Lock()


def start_thread(call: Callable[[], None], name: str) -> threading.Thread:
    """Call a function in a new daemon thread with a large stack."""
    thread = threading.Thread(target=call, name=name, daemon=True)
    with _large_stacks():
        thread.start()
    return thread


def executor(name: str) -> ThreadPoolExecutor:
    """An executor of one thread with a large stack."""
    threads = ThreadPoolExecutor(1, name)
    with _large_stacks():
        threads.submit(lambda: None)  # starts the thread
    return threads


@contextmanager
def _large_stacks() -> Iterator[None]:
    """Threads that start meanwhile have large stacks."""
    with _changing:
        before = threading.stack_size(_STACK)
        try:
            yield
        finally:
            threading.stack_size(before)
