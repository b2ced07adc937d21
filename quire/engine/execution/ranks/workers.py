"""Workers: the processes of all ranks but the core's, which starts and ends them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar

from quire.allocator import use_one_arena
from quire.engine.client.launch import child_process, end_with_parent, forget, kill_with_process, start_without_signals
from quire.engine.execution.ranks.errors import RankDied
from quire.engine.execution.ranks.messages import (
    MAX_REPLY,
    Failed,
    FromWorker,
    RankChannel,
    Stop,
    ToWorker,
    send_frames,
)
from quire.engine.execution.ranks.nodes import JoinedNode, RemoteRank, remote_ranks
from quire.engine.models.distributed.rendezvous import Rendezvous

Reply = TypeVar("Reply", bound=FromWorker)
RankEntry = Callable[[int, Rendezvous, Connection], None]  # runs a rank, given its index and the core
_LOOK_EVERY = 0.1  # seconds between calls of `poll`
_STOP_SECONDS = 1.0
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


class RankHandle(Protocol):
    """A process or thread that runs a rank."""

    @property
    def exitcode(self) -> int | None:
        """Exit code of a process that has ended."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""

    def is_alive(self) -> bool:
        """Whether it runs."""

    def kill(self) -> None:
        """End it by force."""


Launcher = Callable[[RankEntry, int, Rendezvous, Connection], RankHandle]


def rank_process(
    entry: RankEntry, rank: int, rendezvous: Rendezvous, connection: Connection, first: int = 0
) -> BaseProcess:
    """Start a process that runs a rank. `first`: the first rank of this machine, which has its first GPU."""
    # The entry is pickled by itself: reading it imports torch, and before that the process has to watch the core's.
    arguments = (pickle.dumps(entry), rank, rendezvous, connection, rank - first)
    process = child_process(_run_in_process, arguments, f"quire-rank-{rank}")
    start_without_signals(process)
    connection.close()  # the process has its own, whose end is noticed here
    return process


def _run_in_process(entry: bytes, rank: int, rendezvous: Rendezvous, connection: Connection, index: int) -> None:
    end_with_parent(rendezvous.remove)
    use_one_arena()
    os.environ[_VISIBLE_GPUS] = gpu_of_rank(index, os.environ.get(_VISIBLE_GPUS))  # CUDA is not initialized yet
    run: RankEntry = pickle.loads(entry)  # noqa: S301 from our own core
    run(rank, rendezvous, connection)
    os._exit(0)  # Python's own exit takes seconds with torch


def gpu_of_rank(rank: int, visible: str | None) -> str:
    """The GPU that the process of a rank sees: the one with its index among those that its parent sees.

    Args:
        rank: index of the rank on its machine.
        visible: the parent's CUDA_VISIBLE_DEVICES, None if it is not set.

    Returns:
        The CUDA_VISIBLE_DEVICES of the rank; "" for none, on servers that run on CPUs.
    """
    if visible is None:
        return str(rank)
    gpus = [gpu.strip() for gpu in visible.split(",")]
    return gpus[rank] if rank < len(gpus) else ""


class Workers:
    """Own the workers, and talk to them.

    Attributes:
        rendezvous: where the ranks find each other.
    """

    def __init__(
        self,
        entry: RankEntry,
        ranks: int,
        rendezvous: Rendezvous,
        launch: Launcher = rank_process,
        nodes: Sequence[JoinedNode] = (),
    ) -> None:
        """Start the workers of ranks 1 to `ranks` - 1, which are on this machine. `nodes`: have those that follow."""
        self.rendezvous = rendezvous
        kill_with_process(self)
        self._channels: list[RankChannel] = []
        self._handles: list[RankHandle] = []
        self._nodes = nodes
        self._closing = False
        for rank in range(1, ranks):
            server_end, worker_end = multiprocessing.Pipe()
            self._handles.append(launch(entry, rank, rendezvous, worker_end))
            self._channels.append(RankChannel(server_end, FromWorker, MAX_REPLY))
        for remote in remote_ranks(nodes):
            self._handles.append(remote)
            self._channels.append(remote.channel)

    def collect(self, kind: type[Reply], poll: Callable[[], None] = lambda: None) -> list[Reply]:
        """Wait for one message of a kind from each worker; `poll` is called meanwhile.

        Raises:
            RankDied: a worker has ended.
        """
        replies: list[Reply] = []
        for rank, channel in enumerate(self._channels, 1):
            while not channel.connection.poll(_LOOK_EVERY):
                poll()
                self.ensure_alive(besides=rank)
            message = self._receive(rank, channel)
            assert isinstance(message, kind), message
            replies.append(message)
        return replies

    def run(self, function: Callable[[], None], poll: Callable[[], None]) -> None:
        """Run a function that waits for the workers in another thread; `poll` is called meanwhile.

        Raises:
            RankDied: a worker has ended. The thread may then wait for it forever.
        """
        done: Future[None] = Future()

        def call() -> None:
            try:
                function()
            except BaseException as error:  # noqa: BLE001 raised again by `result`
                done.set_exception(error)
            else:
                done.set_result(None)

        threading.Thread(target=call, name="quire-connect", daemon=True).start()
        while not wait([done], _LOOK_EVERY).done:
            poll()
            self.ensure_alive()
        with self.noticing_death():
            done.result()

    def send(self, message: ToWorker) -> None:
        """Send a message to all workers.

        Raises:
            RankDied: a worker has ended.
        """
        with self.noticing_death():
            send_frames([channel.connection for channel in self._channels], message)

    def ensure_alive(self, besides: int = 0) -> None:
        """Check that all workers are alive, but for one.

        Raises:
            RankDied: one has ended.
        """
        for rank, channel in enumerate(self._channels, 1):
            if rank != besides and not self._handles[rank - 1].is_alive():
                while channel.connection.poll():
                    self._receive(rank, channel)
                raise self._died(rank, "")

    @contextmanager
    def noticing_death(self) -> Iterator[None]:
        """Raise RankDied in place of an error that the end of a worker has caused; torch.distributed raises many."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            end = time.monotonic() + _STOP_SECONDS
            while time.monotonic() < end:
                try:
                    self.ensure_alive()
                except RankDied as died:
                    raise died from error
                time.sleep(0.01)
            raise

    def watch(self, on_death: Callable[[], None]) -> None:
        """Call `on_death`, in a thread, when a worker's process or connection has ended before `close`.

        On GPUs, and where a machine is silent, a step that waits for the other rank would wait forever.
        """
        poll, is_watching = select.poll(), False
        for handle in self._handles:
            if isinstance(handle, BaseProcess):
                poll.register(handle.sentinel, select.POLLIN)
                is_watching = True
            elif isinstance(handle, RemoteRank):
                poll.register(handle.channel.connection.fileno(), select.POLLRDHUP)
                is_watching = True

        def watch() -> None:
            poll.poll()
            if not self._closing:
                on_death()

        if is_watching:
            threading.Thread(target=watch, name="quire-ranks", daemon=True).start()

    def close(self, error: str = "") -> None:
        """End all workers. `error`: why, for other nodes; empty: the core was told to."""
        self._closing = True
        for channel in self._channels:
            with contextlib.suppress(OSError):
                channel.send(Stop())
        end = time.monotonic() + _STOP_SECONDS
        for handle in self._handles:
            handle.join(max(0.0, end - time.monotonic()))
        self.kill()
        for handle in self._handles:
            handle.join(_STOP_SECONDS)
        for channel in self._channels:
            channel.close()
        for node in self._nodes:
            node.end(error)
        forget(self)

    def kill(self) -> None:
        """End all workers at once, and delete what is left of the rendezvous."""
        for handle in self._handles:
            if handle.is_alive():
                handle.kill()
        self.rendezvous.remove()

    def _receive(self, rank: int, channel: RankChannel) -> Any:
        try:
            message = channel.receive()
        except (EOFError, OSError) as error:
            raise self._died(rank, "") from error
        if isinstance(message, Failed):
            raise self._died(rank, message.error)
        return message

    def _died(self, rank: int, reason: str) -> RankDied:
        handle = self._handles[rank - 1]
        if not reason:
            handle.join(_STOP_SECONDS)
            code = handle.exitcode
            is_silent = isinstance(handle, RemoteRank) and code is None
            reason = "its connection has ended" if is_silent else f"its process ended with exit code {code}"
        place = f" on {handle.node}" if isinstance(handle, RemoteRank) else ""
        return RankDied(f"rank {rank} of {len(self._handles) + 1}{place} has stopped: {reason}")
