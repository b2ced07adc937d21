"""Starts a core in a thread (the default) or in its own process, and detects its death.

A process ends with its server, however that ends.
"""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import multiprocessing.connection
import os
import pickle
import secrets
import shutil
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from quire.allocator import use_one_arena

_SERVERS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # which a terminal or supervisor sends
LAST_MESSAGES = 0.5  # seconds in which the reason that a process has sent before its end is received
CoreEntry = Callable[[str], None]  # runs a core on an address until it is shut down
# A new interpreter: in a fork of a process with threads, locks that other threads held would never be released.
_CHILDREN: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")


def child_process(
    target: Callable[..., None], args: tuple[Any, ...], name: str, *, daemon: bool = False
) -> BaseProcess:
    """Return a process that is not started yet. A daemon cannot start processes itself."""
    return _CHILDREN.Process(target=target, args=args, name=name, daemon=daemon)


def forked_process(
    target: Callable[..., None], args: tuple[Any, ...], name: str, *, daemon: bool = False
) -> BaseProcess:
    """Like `child_process`, but a copy of this process if it has no other threads.

    The copy has all that is imported already: a new interpreter takes 0.3 s until it has.
    """
    threads = Path("/proc/self/task")
    is_alone = threads.exists() and len(list(threads.iterdir())) == 1
    context = multiprocessing.get_context("fork") if is_alone else _CHILDREN
    return context.Process(target=target, args=args, name=name, daemon=daemon)


def allowed_cores() -> list[int]:
    """Return the logical cores that this process may use: all of the machine where it cannot be told, as on macOS."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """The part of the machine that a process of a core has, of several that divide it.

    Attributes:
        cores: CPU cores that it runs on; empty: all.
        gpus: GPUs that it sees, in the words of CUDA_VISIBLE_DEVICES; empty: all.
    """

    cores: frozenset[int] = frozenset()
    gpus: tuple[str, ...] = ()

    def take(self) -> None:
        """Move this process there, and what it starts later. Neither torch nor CUDA has looked around yet."""
        if self.cores and hasattr(os, "sched_setaffinity"):  # not on macOS
            with suppress(OSError):  # a core was taken offline: the others of the machine do as well
                os.sched_setaffinity(0, self.cores)
        if self.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)


EVERYWHERE = ProcessPlace()


class Ending:
    """Tells a process to end in order. It may be starting another one, which without its arguments tells of an error.

    Attributes:
        told: where the process is told; see `end_with_parent`.
    """

    def __init__(self) -> None:
        self.told, self._tell = multiprocessing.Pipe(duplex=False)

    def end(self, process: BaseProcess) -> None:
        """End the process, by force if it has not ended soon."""
        with suppress(OSError):  # it has ended
            self._tell.send_bytes(b"end")
        process.join(_END_SECONDS)
        process.kill()

    def close(self) -> None:
        """Close the pipe; the process has ended."""
        self.told.close()
        self._tell.close()


class PreparedProcess:
    """A process that starts before its core is known, and imports meanwhile what cores need.

    Attributes:
        folder: of its core's socket. It is made for the core; the process removes it if the server is killed.
    """

    def __init__(self, prepare: Callable[[], None]) -> None:
        """Start it. `prepare`: imports what cores need; it can be pickled."""
        self._connection, end = multiprocessing.Pipe()
        self.ending = Ending()
        self.folder = _new_folder()
        arguments = end, self.ending.told, prepare, self.folder
        self.process = forked_process(_run_prepared, arguments, "quire-engine")
        start_without_signals(self.process)
        end.close()  # so that the end of the process ends the pipe

    def run(self, entry: bytes, address: str, place: ProcessPlace) -> None:
        """Run a core; see `_run_in_process`."""
        with suppress(OSError), self._connection:  # the process has ended, which its owner is told
            self._connection.send((entry, address, place))

    def cancel(self) -> None:
        """End the process, which gets no core."""
        self._connection.close()
        self.process.kill()
        self.process.join()
        self.ending.close()


def _run_prepared(connection: Connection, told: Connection, prepare: Callable[[], None], folder: Path) -> None:
    """Body of a `PreparedProcess`."""
    show_name()
    end_with_parent(partial(_remove, folder), told)
    prepare()
    with suppress(EOFError), connection:  # the server has ended
        entry, address, place = connection.recv()
        place.take()
        _run_core(entry, address)


class CoreHandle(Protocol):
    """A running core."""

    address: str

    def start(self, entry: CoreEntry, on_death: Callable[[str], None]) -> None:
        """Run `entry`; call `on_death` with a reason, on this event loop, if it ends before `join`."""

    async def join(self, seconds: float) -> None:
        """Wait until the core has ended; end it by force after `seconds` where that is possible."""


class ThreadCore:
    """A core in a thread. Its `entry` catches and reports every exception."""

    def __init__(self) -> None:
        self.address = f"inproc://quire-{uuid.uuid4().hex}"
        self._thread: threading.Thread | None = None
        self._joined = False

    def start(self, entry: CoreEntry, on_death: Callable[[str], None]) -> None:
        """Run `entry` in a daemon thread."""
        loop = asyncio.get_running_loop()

        def ended(reason: str) -> None:
            if not self._joined:
                on_death(reason)

        def run() -> None:
            try:
                entry(self.address)
            except BaseException as error:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(ended, f"its thread ended with {type(error).__name__}: {error}")
                raise

        self._thread = threading.Thread(target=run, name="quire-engine", daemon=True)
        self._thread.start()

    async def join(self, seconds: float) -> None:
        """Wait until the thread has ended; a stuck thread ends with the process."""
        self._joined = True
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, seconds)


class ProcessCore:
    """A core in its own process, connected through a socket file in a private folder."""

    def __init__(
        self, place: ProcessPlace = EVERYWHERE, name: str = "quire-engine", prepared: PreparedProcess | None = None
    ) -> None:
        """`place`: where it runs. `name`: of the process. `prepared`: the process; None: it starts for this core."""
        self._prepared = prepared
        self._place = place
        self._name = name
        self._folder = _new_folder() if prepared is None else prepared.folder
        kill_with_process(self)  # which removes the folder
        self._folder.mkdir(mode=0o700)
        self.address = f"ipc://{self._folder / 'engine'}"
        self._process: BaseProcess | None = None
        self._ending = Ending() if prepared is None else prepared.ending
        self._report: asyncio.TimerHandle | None = None

    def start(self, entry: CoreEntry, on_death: Callable[[str], None]) -> None:
        """Run `entry` in the process and watch it."""
        process = self.launch(entry)
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(process.sentinel)
            was_killed = (process.exitcode or 0) < 0  # a process that is killed has given no reason
            self._report = loop.call_later(0.0 if was_killed else LAST_MESSAGES, report)

        def report() -> None:
            on_death(reason_of(process))

        loop.add_reader(process.sentinel, ended)

    def launch(self, entry: CoreEntry) -> BaseProcess:
        """Run `entry` in the process, which the caller watches, and ends by `end`."""
        # The entry is pickled by itself: reading it imports torch, and before that the process has to watch its server.
        # Not a daemon, which could not start the processes of other ranks; `kill_processes` ends it as well.
        arguments = pickle.dumps(entry), self.address, self._place
        if self._prepared is None:
            process = child_process(_run_in_process, (*arguments, self._ending.told), self._name)
            start_without_signals(process)
        else:
            process = self._prepared.process
            self._prepared.run(*arguments)
        self._process = process
        return process

    def end(self, seconds: float) -> None:
        """Wait until the process has ended; kill it after `seconds`. Without an event loop, after `launch`."""
        if self._process is not None:
            self._process.join(seconds)
        self.kill()
        if self._process is not None:
            self._process.join()
        self._ending.close()
        forget(self)

    @property
    def folder(self) -> Path:
        """Of the socket."""
        return self._folder

    @property
    def pid(self) -> int | None:
        """Process id; None before `start`."""
        return self._process.pid if self._process else None

    async def join(self, seconds: float) -> None:
        """Wait until the process has ended; kill it after `seconds`."""
        process = self._process
        if process is not None:
            asyncio.get_running_loop().remove_reader(process.sentinel)
            if self._report is not None:
                self._report.cancel()
            await asyncio.to_thread(process.join, seconds)
            if process.is_alive():
                await asyncio.to_thread(self._ending.end, process)
                await asyncio.to_thread(process.join)
        self._ending.close()
        _remove(self._folder)
        forget(self)

    def kill(self) -> None:
        """End the process, and delete its folder."""
        if self._process is not None:
            self._ending.end(self._process)
        _remove(self._folder)


def reason_of(process: BaseProcess) -> str:
    """Return why an engine has stopped whose process has ended."""
    return f"its process ended with exit code {process.exitcode}"


class Killable(Protocol):
    """An owner of processes."""

    def kill(self) -> None:
        """End the processes, and delete what belongs to them."""


_START_SECONDS = 2.0  # after which a process that ends does not wait for one that is being started
_END_SECONDS = 3.0  # in which a process that is told to has ended


class _Started:
    """What this process has started.

    Attributes:
        owners: of processes.
        starting: held while a process is started and gets its arguments.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin in a fork, whose parent held the lock, and has what it has started."""
        self.owners: set[Killable] = set()
        self.starting = threading.RLock()


_started = _Started()
os.register_at_fork(after_in_child=_started.reset)


def kill_with_process(owner: Killable) -> None:
    """Kill the owner's processes when this process ends."""
    _started.owners.add(owner)


def forget(owner: Killable) -> None:
    """The owner has ended its processes."""
    _started.owners.discard(owner)


def kill_processes() -> None:
    """End all processes of cores and other children; for the end of a server that does not wait for them."""
    # A child without arguments tells of an error, and belongs to nobody yet. The lock is kept: none is started anymore.
    _started.starting.acquire(timeout=_START_SECONDS)
    for owner in list(_started.owners):
        owner.kill()
    for child in multiprocessing.active_children():
        child.kill()


# Runs before multiprocessing's own handler, which would wait forever for a process that ignores SIGTERM.
atexit.register(kill_processes)


def _run_in_process(entry: bytes, address: str, place: ProcessPlace, told: Connection) -> None:
    """Entry point of a core's process. The server ends it by a message; it also ends when the server is killed."""
    place.take()
    show_name()
    end_with_parent(partial(_remove, Path(address.removeprefix("ipc://")).parent), told)
    _run_core(entry, address)


def _new_folder() -> Path:
    """Return a path for the folder of a core's socket, which is not made yet."""
    return Path(tempfile.gettempdir()) / f"quire-{secrets.token_hex(4)}"


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _run_core(entry: bytes, address: str) -> None:
    use_one_arena()
    run: CoreEntry = pickle.loads(entry)  # noqa: S301 from our own server
    run(address)


def show_name() -> None:
    """Let ps and top show the name of this process, whose command line may be that of its server."""
    with suppress(OSError):  # no Linux
        Path("/proc/self/comm").write_text(multiprocessing.current_process().name, encoding="ascii")


def start_without_signals(process: BaseProcess) -> None:
    """Start a process that `end_with_parent` protects from signals, before it has called it."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SERVERS_SIGNALS)
    try:
        with _started.starting:
            process.start()  # it inherits what this thread blocks
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def end_with_parent(clean_up: Callable[[], None] = lambda: None, told: Connection | None = None) -> None:
    """End this process when the server does, and not by signals: the server decides when its children end.

    A terminal or supervisor sends signals to all processes, and the server first finishes its requests.

    Args:
        clean_up: called when the server has ended without ending this process.
        told: where the server tells this process to end; see `Ending`.
    """
    for ignored in _SERVERS_SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel] if told is None else [parent.sentinel, told])
        kill_processes()
        clean_up()
        os._exit(1)

    threading.Thread(target=watch, name="quire-watch", daemon=True).start()
