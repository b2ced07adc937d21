"""One worker process, seen from the server."""

from __future__ import annotations

import asyncio
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire.workers.child import HEADER, OUT_OF_MEMORY, Reply, Setup
from quire.workers.errors import Cause, JobKilled, JobTimedOut, WorkerError
from quire.workers.limits import WorkerLimits

# The signals are ignored before anything else: a terminal or supervisor sends them to all processes.
_PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.path[:] = sys.argv[1:]
from quire.workers.child import main
main()
"""
_START_SECONDS = 60.0
_END_SECONDS = 5.0  # a killed process ends at once, unless the system is stuck
_BUFFER = 1 << 20  # bytes
_WALL_TIME = 10  # times the limit of processor time; a long job has low priority and may have to wait
_LOW_PRIORITY = 10  # nice value
_PROCESS_CLOCK = 2  # with the complement of a process id above it: Linux's number of the clock of its processor time


class WorkerProcess:
    """A started process that does one job at a time."""

    def __init__(
        self,
        creating: asyncio.Future[subprocess.Popen[bytes]],
        limits: WorkerLimits,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._creating = creating
        self._limits = limits
        self._reader = reader
        self._writer = writer
        self._retired = False

    @classmethod
    async def start(cls, setup: Setup, threads: Executor) -> WorkerProcess:
        """Start a process and wait until it is ready.

        Args:
            setup: factory, arguments and limits of the process.
            threads: thread pool in which the process is created and waited for.

        Raises:
            WorkerError: it has not become ready. Exceptions of the factory are raised as they are.
        """
        server_end, worker_end = socket.socketpair()
        try:
            reader, writer = await asyncio.open_unix_connection(sock=server_end, limit=_BUFFER)
        except BaseException:
            server_end.close()
            worker_end.close()
            raise
        creating = asyncio.get_running_loop().run_in_executor(threads, _create, worker_end)
        worker = cls(creating, setup.limits, reader, writer)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.shield(creating)
                reply = await worker._exchange(setup)
        except (TimeoutError, JobKilled, OSError) as error:
            await worker.end(threads)
            raise WorkerError(f"a worker process cannot be started: {error or 'it takes too long'}") from error
        except asyncio.CancelledError:
            await worker.end(threads)
            raise
        if reply.kind == "error":
            await worker.end(threads)
            raise reply.value
        return worker

    @property
    def usable(self) -> bool:
        """Whether it takes another job."""
        return not self._retired and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def run(self, job: Any) -> Any:
        """Do a job, and return its result or raise its exception.

        Raises:
            JobTimedOut: it took too long, and its process has been killed.
            JobKilled: the process has ended.
        """
        try:
            async with asyncio.timeout(_WALL_TIME * self._limits.seconds):
                reply = await self._exchange((job,))
        except TimeoutError as error:
            self.kill()
            raise JobTimedOut("it takes too long", stalled=True) from error
        except asyncio.CancelledError:
            self.kill()
            raise
        self._retired = self._retired or reply.retires
        if reply.kind == "error":
            raise reply.value
        return reply.value

    def processor_seconds(self) -> float:
        """Processor time that it has used; real time on systems other than Linux."""
        if sys.platform != "linux":
            return time.monotonic()
        with suppress(OSError):  # it has ended
            return time.clock_gettime(~self.pid << 3 | _PROCESS_CLOCK)
        return 0.0

    def lower_priority(self) -> None:
        """Let everything else run before this process, from now on."""
        for thread in _threads_of(self.pid):
            with suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, thread, _LOW_PRIORITY)

    def kill(self) -> None:
        """End the process at once."""
        self._retired = True
        self._process.kill()

    async def end(self, threads: Executor) -> None:
        """End the process and wait for it, also if this task is cancelled meanwhile."""
        self._retired = True
        self._writer.close()
        ending = asyncio.create_task(self._end(threads))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    async def _end(self, threads: Executor) -> None:
        with suppress(OSError):  # there is no process
            process = await self._creating
            await asyncio.get_running_loop().run_in_executor(threads, _kill, process)

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        return self._creating.result()

    async def _exchange(self, message: object) -> Reply:
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            self._writer.write(HEADER.pack(len(content)))
            self._writer.write(content)
            await self._writer.drain()
            pieces = [await self._piece() for _ in range(await self._number())]
            reply: Reply = pickle.loads(pieces[0], buffers=pieces[1:])  # noqa: S301 from our own process
        except (asyncio.IncompleteReadError, OSError) as error:
            raise await self._failure() from error
        return reply

    async def _number(self) -> int:
        (number,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        return int(number)

    async def _piece(self) -> memoryview:
        """Read into place, in parts: a hundred megabytes would block the event loop while they are copied at once."""
        size = await self._number()
        piece = memoryview(_returned_when_freed(size) if size > _BUFFER else bytearray(size))
        filled = 0
        while filled < size:
            part = await self._reader.read(min(_BUFFER, size - filled))
            if not part:
                raise asyncio.IncompleteReadError(b"", size)
            piece[filled : filled + len(part)] = part
            filled += len(part)
        return piece

    async def _failure(self) -> WorkerError:
        """Return why the process has ended."""
        self._retired = True
        for _ in range(1000):  # its files are closed a moment before it can be waited for
            if self._process.poll() is not None:
                break
            await asyncio.sleep(0.001)
        status = self._process.poll()
        if status == -signal.SIGPROF:
            return JobTimedOut(f"it takes more than {self._limits.seconds:g} s")
        if status in (OUT_OF_MEMORY, -signal.SIGABRT):  # a failed allocation aborts native code
            return JobKilled(Cause.MEMORY)
        if status == -signal.SIGKILL:
            return JobKilled(Cause.KILLED)
        return JobKilled(Cause.STACK if status in (-signal.SIGSEGV, -signal.SIGBUS) else Cause.CRASH)


def _returned_when_freed(size: int) -> mmap.mmap:
    """Memory outside the heap. The event loop may be who frees it, hours of audio at once.

    230 MB took 44 ms of CPU time to free as shared memory, mmap's default, and 136 to write; private memory 16 and 85,
    in huge pages 0.7 and 14.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _threads_of(pid: int) -> Iterable[int]:
    """Ids of the threads of a process; a priority belongs to a thread on Linux."""
    folder = Path(f"/proc/{pid}/task")
    return [int(entry.name) for entry in folder.iterdir()] if folder.exists() else [pid]


def _create(connection: socket.socket) -> subprocess.Popen[bytes]:
    with connection:
        return subprocess.Popen(  # noqa: S603 our own program
            [sys.executable, "-c", _PROGRAM, *sys.path],
            stdin=connection.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
