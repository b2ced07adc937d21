"""Start the `quire` command, or a worker process, from a process that has imported it already.

Imports take longer than all else in most tests. Each process of the tests starts one process that imports the server
and then waits. For each start it forks, and what it has forked runs the command, or the worker, as a process of its
own: with its own files, environment, signals and children.

A server's cores and ranks and the reader of its configs are forked as well, by the library's fork server. It is forked
from the server before that has threads. Users' servers start them in new interpreters.
"""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from unittest.mock import patch

MESSAGE_BYTES = 1 << 17
_LOCK = threading.Lock()  # pools start workers in threads
_run_program = multiprocessing.util.spawnv_passfds


class ForkedProcess:
    """A process of the command, with those methods of `subprocess.Popen` that tests use."""

    def __init__(self, reports: socket.socket) -> None:
        self._reports = reports
        self.pid = int(reports.recv(16))
        self.returncode: int | None = None
        self._receiving = threading.Lock()

    def __del__(self) -> None:
        self._reports.close()  # nobody waits for the end any more

    def poll(self) -> int | None:
        """The exit status, that of a signal being negative; None while it runs."""
        return self._status_after(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        status = self._status_after(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("quire", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _status_after(self, timeout: float | None) -> int | None:
        # A worker is polled in one thread while another waits for its end.
        if self.returncode is None and self._receiving.acquire(blocking=timeout != 0):
            try:
                if self.returncode is None and select.select([self._reports], [], [], timeout)[0]:
                    self.returncode = os.waitstatus_to_exitcode(int(self._reports.recv(16)))
                    self._reports.close()
            finally:
                self._receiving.release()
        return self.returncode


def start(
    arguments: Sequence[str],
    env: dict[str, str],
    stdin: int,
    stdout: int,
    stderr: int,
    *,
    new_interpreters: bool = False,
) -> ForkedProcess:
    """Run the `quire` command with these file descriptors; its children in new interpreters, if they are the test."""
    fork_children = arguments[0] in ("serve", "render") and not new_interpreters
    message = {"arguments": arguments, "env": env, "folder": os.getcwd(), "fork_children": fork_children}
    return _fork(message, [stdin, stdout, stderr])


def start_worker(connection: socket.socket) -> ForkedProcess:
    """Run a worker process at the other end of a connection, as `quire.workers.process` does."""
    with connection, open(os.devnull, "r+b") as nothing:
        files = [connection.fileno(), nothing.fileno(), nothing.fileno()]
        return _fork({"arguments": None, "env": dict(os.environ), "folder": os.getcwd()}, files)


def _fork(message: dict[str, object], files: list[int]) -> ForkedProcess:
    reports, reporter = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    content = json.dumps(message).encode()
    assert len(content) <= MESSAGE_BYTES
    with reporter, _LOCK:
        socket.send_fds(_preloaded(), [content], [*files, reporter.fileno()])
    return ForkedProcess(reports)


@lru_cache(maxsize=1)
def _preloaded() -> socket.socket:
    """A connection to the process that forks, which ends with this one's."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.preloaded", str(there.fileno())],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
        )

    def end() -> None:
        here.close()
        process.wait()

    atexit.register(end)
    return here


def _fork_when_told(control: socket.socket) -> list[str] | None:
    """Return the arguments in each process that is forked, None in a worker; this one ends with its parent."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for supervisors
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 4)
        if not message:
            sys.exit()
        *files, reporter = descriptors
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            _supervise(files, reporter)
            return _become(json.loads(message), files)
        for descriptor in descriptors:
            os.close(descriptor)


def _supervise(files: list[int], reporter: int) -> None:
    """Fork once more and return in the child; tell its id and its exit status."""
    pid = os.fork()
    if pid == 0:
        os.close(reporter)
        return
    for descriptor in files:
        os.close(descriptor)
    os.write(reporter, str(pid).encode())
    status = os.waitpid(pid, 0)[1]
    with suppress(BrokenPipeError):  # nobody waits for it
        os.write(reporter, str(status).encode())
    os._exit(0)


def _become(message: dict[str, object], files: list[int]) -> list[str] | None:
    """Make this process like one that a shell has just started; return its arguments, None for a worker."""
    arguments, env, folder = message["arguments"], message["env"], message["folder"]
    assert arguments is None or isinstance(arguments, list)
    assert isinstance(env, dict)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(str(folder))
    tempfile.tempdir = None  # TMPDIR may be another one
    for standard, descriptor in enumerate(files):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    if message.get("fork_children"):
        _fork_children()
    return arguments


def _fork_children() -> None:
    """Let multiprocessing's children of this process be forked, by a process that is forked here.

    What they start themselves, as a core starts its ranks, runs in new interpreters.
    """
    with patch.object(multiprocessing.util, "spawnv_passfds", _fork_program):
        multiprocessing.forkserver.ensure_running()
    launch._CHILDREN = multiprocessing.get_context("forkserver")
    launch._run_prepared = partial(_run_prepared, launch._run_prepared)


def _run_prepared(run: Callable[..., None], *arguments: object) -> None:
    """Body of an engine's process that this one forks itself: another process than the server's forks its children."""
    setattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)  # that of the server  # noqa: B010
    _fork_children()
    run(*arguments)


def _fork_program(_: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Do in a fork what an interpreter with these arguments would: its program is the last one."""
    pid = os.fork()
    if pid == 0:
        try:
            _close_all_but({0, 1, 2, *descriptors})
            multiprocessing.util.spawnv_passfds = _run_program
            signal.pthread_sigmask(signal.SIG_BLOCK, launch._SERVERS_SIGNALS)  # as `start_without_signals` does
            exec(arguments[-1])  # noqa: S102 the library's own
            os._exit(0)
        except SystemExit:
            os._exit(0)
        except BaseException:  # noqa: BLE001 the edge of the process
            traceback.print_exc()
            os._exit(1)
    return pid


def _close_all_but(descriptors: set[int]) -> None:
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if descriptor not in descriptors:
            with suppress(OSError):  # that of the folder itself
                os.close(descriptor)


if __name__ == "__main__":
    from quire.app.cli import main, prepare_process

    connection = socket.socket(fileno=int(sys.argv[1]))
    prepare_process()  # before torch is imported
    import quire.__main__
    import quire.app.chat
    import quire.app.lifecycle
    import quire.app.listen
    import quire.app.serve
    import quire.multimodal.audio.decode
    import quire.multimodal.documents
    import quire.multimodal.pictures.decode
    import quire.multimodal.videos.decode
    import quire.parsing.structured.compilation
    import quire.rendering.prompts
    import quire.workers.child
    from quire.engine.client import launch
    from quire.engine.models.model_config import read_model_config

    read_model_config(Path(quire.__file__).parent / "bundled" / "nano")  # imports of transformers and the families
    gc.freeze()  # else collections of what is forked would write to all pages
    command = _fork_when_told(connection)
    if command is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        quire.workers.child.main()
        sys.exit()
    sys.argv[1:] = command
    sys.modules["__main__"] = quire.__main__  # processes that the server starts import it
    main()
