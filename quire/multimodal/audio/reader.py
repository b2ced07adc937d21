"""Decodes files in worker processes and computes features in threads, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.config.media_options import AudioOptions
from quire.multimodal.audio.decode import AudioError, DecodedAudio
from quire.multimodal.audio.features import SAMPLE_RATE, log_mel
from quire.multimodal.audio.limits import AudioLimits
from quire.workers.errors import JobKilled, JobTimedOut, QueueFull
from quire.workers.limits import WorkerLimits
from quire.workers.pool import WorkerPool
from quire.workers.shares import Shares
from quire.workers.threads import FairThreads

Result = TypeVar("Result")
_SECONDS = 90.0  # of processor time to decode a file; an hour of Opus takes 25
_WORKER_MEMORY = 256 << 20  # bytes, beside the file and the result
_HELD = 1 << 30  # bytes of decoded audio in this process from which on further files wait


class AudioReader:
    """Prepares the audio of one model's requests."""

    def __init__(self, options: AudioOptions, *, max_queued: int = 1024, share: float = 1.0, held: int = _HELD) -> None:
        """Nothing is started yet.

        Args:
            options: limits of files.
            max_queued: files that may wait for a process.
            share: the largest part of these, and of the audio that is held, for one tenant; see `Shares`.
            held: bytes of decoded audio from which on further files wait before they are decoded.
        """
        self.limits = AudioLimits(
            int(options.max_audio_size), options.max_audio_seconds, int(options.max_audio_decoded_size)
        )
        memory = _WORKER_MEMORY + 4 * self.limits.size + round(5 * SAMPLE_RATE * self.limits.seconds)
        self._processes = WorkerPool(
            "audio",
            "quire.multimodal.audio.decode:worker",
            (self.limits,),
            WorkerLimits(memory=memory, seconds=_SECONDS, stack=1 << 24),
            size=2,
            max_queued=max_queued,
            share=share,
        )
        self._threads = FairThreads("audio", size=2, max_queued=4 * max_queued, share=share)
        self._room = _Room(held, share)

    async def decode(self, file: BinaryIO | bytes, *, tenant: str = "") -> DecodedAudio:
        """The audio of a file. While much audio is held (see `hold`), it waits before it is decoded.

        Args:
            file: the bytes, or the file that they are read from once a process is free to decode them.
            tenant: the tenant that sent the file; tenants take turns.

        Raises:
            AudioError: it is empty, not audio, broken, or beyond a limit.
            QueueFull: too many files wait.
            WorkerError: processes cannot be started.
        """
        await self._room.wait(tenant)
        try:
            audio: DecodedAudio = await self._processes.run(_Content(file), tenant=tenant)
        except JobTimedOut as error:
            if error.stalled:
                raise QueueFull("the file waited too long for processor time") from error
            raise AudioError(f"Decoding the file took more than {_SECONDS:g} s.") from error
        except JobKilled as error:
            raise AudioError(f"The file cannot be decoded: {error}.") from error
        return audio

    @contextmanager
    def hold(self, audio: DecodedAudio, *, tenant: str = "") -> Iterator[None]:
        """Count audio of a tenant as held by this process, until the context ends."""
        size = audio.samples.nbytes
        self._room.take(size, tenant)
        try:
            yield
        finally:
            self._room.give_back(size, tenant)

    async def log_mel(
        self, samples: NDArray[np.float32], num_mel_bins: int, seconds: float, *, tenant: str = ""
    ) -> NDArray[np.float32]:
        """Log-mel features of samples, computed by `features.log_mel` in a thread.

        Raises:
            QueueFull: too many jobs wait.
        """
        return await self.run(partial(log_mel, samples, num_mel_bins, seconds), tenant=tenant)

    async def run(self, work: Callable[[], Result], *, tenant: str = "") -> Result:
        """Run a function in a thread; see `FairThreads.run`."""
        return await self._threads.run(work, tenant=tenant)

    async def close(self) -> None:
        """End the threads and processes."""
        self._threads.close()
        await self._processes.close()


class _Content:
    """The bytes of a file, which are read when it is sent to a process: until then a large one stays on disk."""

    def __init__(self, file: BinaryIO | bytes) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self._file, bytes):
            return bytes, (self._file,)
        self._file.seek(0)
        return bytes, (self._file.read(),)


class _Room:
    """Counts decoded bytes, and lets those who want to decode more wait in order while there are too many.

    Who waits because of the audio of its own tenant keeps nobody else waiting.
    """

    def __init__(self, size: int, share: float) -> None:
        self._bytes = Shares(size, share)
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    async def wait(self, tenant: str) -> None:
        """Return once less than the bound is held, and less than its share by the tenant."""
        if self._bytes.refusal(tenant) is None and not any(other == tenant for other, _ in self._waiting):
            return
        entry = (tenant, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            await entry[1]
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    def take(self, size: int, tenant: str) -> None:
        """Count some bytes."""
        self._bytes.take(tenant, size)

    def give_back(self, size: int, tenant: str) -> None:
        """Stop counting some bytes, and let others go on."""
        self._bytes.give_back(tenant, size)
        for entry in list(self._waiting):
            if self._bytes.refusal(entry[0]) is None:
                self._waiting.remove(entry)
                if not entry[1].done():
                    entry[1].set_result(None)
