"""The worker process: runs one job after another in a thread with a large stack.

Its end of a socket pair is file descriptor 0. Messages are pickled, with their length in front. Replies have more of
these pieces: their number, the pickled reply, then large arrays as they are in memory, which are read into place.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from quire.allocator import return_freed_memory, use_one_arena
from quire.workers.errors import WorkerError
from quire.workers.limits import WorkerLimits

HEADER = struct.Struct("<Q")  # bytes of the message that follows
OUT_OF_MEMORY = 70  # exit statuses
CRASHED = 71
_LARGE = 1 << 20  # bytes of a job or its reply, after which memory is returned to the system
_RETIRE_AT = 0.25  # share of the memory limit; a worker that keeps more of it after a job is replaced


class Setup(NamedTuple):
    """The first message to a worker."""

    target: str
    arguments: tuple[Any, ...]
    limits: WorkerLimits


class Reply(NamedTuple):
    """The answer to the setup and to each job.

    Attributes:
        kind: meaning of `value`.
        retires: the worker has ended itself; it takes no more jobs.
    """

    kind: Literal["result", "error"]
    value: Any
    retires: bool = False


def main() -> None:
    """Serve jobs until the pool closes the connection."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    use_one_arena()
    connection = socket.socket(fileno=os.dup(0))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    content = _receive(connection)
    if content is None:
        return
    setup: Setup = pickle.loads(content)  # noqa: S301 from our own server
    threading.stack_size(setup.limits.stack)
    thread = threading.Thread(target=_serve, args=(connection, setup), name="quire-jobs")
    thread.start()
    thread.join()


def _serve(connection: socket.socket, setup: Setup) -> None:
    try:
        module, _, name = setup.target.partition(":")
        work = getattr(importlib.import_module(module), name)(*setup.arguments)
    except Exception as error:  # noqa: BLE001 error boundary: the pool raises it
        _send(connection, Reply("error", _portable(error), retires=True))
        return
    before = _data_size()
    if sys.platform == "linux":
        allowed = before + setup.limits.memory
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    _send(connection, Reply("result", None))
    retires = False
    try:
        while not retires and (content := _receive(connection)) is not None:
            signal.setitimer(signal.ITIMER_PROF, setup.limits.seconds)  # of processor time; SIGPROF ends the process
            reply = _do(work, content, connection)
            signal.setitimer(signal.ITIMER_PROF, 0)
            size = len(content)
            del content
            if size > _LARGE:
                _return_memory()
            retires = _data_size() - before > _RETIRE_AT * setup.limits.memory
            size += _send(connection, reply._replace(retires=retires))
            del reply  # before the next message needs memory
            if size > _LARGE:
                _return_memory()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException:  # noqa: BLE001 a panic of native code, whose state cannot be trusted any more
        os._exit(CRASHED)


def _do(work: Callable[[Any], Any], content: bytearray, connection: socket.socket) -> Reply:
    _end_on_hangup(connection, True)
    try:
        return Reply("result", work(*pickle.loads(content)))  # noqa: S301 from our own server
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 error boundary: the caller of the job raises it
        return Reply("error", _portable(error))
    finally:
        _end_on_hangup(connection, False)


def _return_memory() -> None:
    """Return freed memory to the system; exceptions and templates leave cycles that refer to whole texts."""
    gc.collect()
    return_freed_memory()


def _end_on_hangup(connection: socket.socket, enabled: bool) -> None:
    """Let the kernel kill this process (SIGIO) when the server closes the connection or dies.

    Native code may hold the interpreter's lock for a whole job, so no thread could watch. During a job the server
    sends nothing, so the signal has no other cause.
    """
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    if not enabled:
        fcntl.fcntl(connection, fcntl.F_SETFL, flags & ~os.O_ASYNC)
        return
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([connection], [], [], 0)[0]:
        os._exit(CRASHED)  # closed before the signal was enabled


def _portable(error: Exception) -> Exception:
    """The exception, if it can be pickled, else one with its text."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 our own
    except Exception:  # noqa: BLE001 __reduce__ and __init__ of any class may fail
        return WorkerError(f"{type(error).__name__}: {error}")
    return error


def _data_size() -> int:
    """Bytes of private writable memory."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    line = next(line for line in status.read_text("ascii").splitlines() if line.startswith("VmData:"))
    return int(line.split()[1]) << 10


def _send(connection: socket.socket, reply: Reply) -> int:
    """Send a reply; returns its size in bytes."""
    arrays: list[pickle.PickleBuffer] = []

    def keep_in_message(array: pickle.PickleBuffer) -> bool:
        large = array.raw().nbytes > _LARGE
        if large:
            arrays.append(array)
        return not large

    try:
        content = pickle.dumps(reply, pickle.HIGHEST_PROTOCOL, buffer_callback=keep_in_message)
    except Exception as error:  # noqa: BLE001 a result that cannot be pickled
        arrays.clear()
        content = pickle.dumps(Reply("error", _portable(error), reply.retires))
    pieces = [memoryview(content), *(array.raw() for array in arrays)]
    try:
        connection.sendall(HEADER.pack(len(pieces)))
        for piece in pieces:
            connection.sendall(HEADER.pack(piece.nbytes))
            connection.sendall(piece)
    except OSError:
        os._exit(0)  # the server is gone
    return sum(piece.nbytes for piece in pieces)


def _receive(connection: socket.socket) -> bytearray | None:
    """The next message, pickled; None at the end of the connection."""
    header = _read(connection, HEADER.size)
    if header is None:
        return None
    return _read(connection, HEADER.unpack(header)[0])


def _read(connection: socket.socket, count: int) -> bytearray | None:
    content = bytearray(count)
    view = memoryview(content)
    while view:
        try:
            received = connection.recv_into(view)
        except OSError:
            return None
        if not received:
            return None
        view = view[received:]
    return content
